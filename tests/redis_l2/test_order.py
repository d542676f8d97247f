"""What is urgent passes what is not, and what nobody waits for is taken back."""

import pytest
from redis_driver import Driver, Memory, key_of, wait_for

from tailreplay.store.misses import Miss
from tailreplay.store.objects import Kind
from tailreplay.store.urgent_gate import UrgentGate

pytestmark = pytest.mark.redis


def test_urgent_loads_pass_bulk_loads_which_pass_stores(open_driver, redis_server, redis):
    """With Redis frozen all tasks queue up; the order in which it then sees them is the proof."""
    driver = open_driver(redis_server.url, workers=1)
    kinds = {Kind.KV: "load", Kind.HIDDEN: "urgent", Kind.CHECKPOINT: "urgent"}
    driver.store(*((key_of(i, kind), 10) for i in range(3) for kind in Kind))
    redis.call(b"CONFIG", b"SET", b"slowlog-log-slower-than", b"0")
    redis_server.pause()
    adapter = driver.adapter
    adapter.submit_store_task([key_of(9)], [Memory(b"x" * 10)])
    driver.until(lambda status: not status["shards"][0]["queued"])  # the one worker has it
    adapter.submit_store_task([key_of(8)], [Memory(b"x" * 10)])
    for i in range(3):
        for kind in Kind:
            adapter.submit_load_task([key_of(i, kind)], [Memory(b"x" * 10)])
    redis_server.resume()
    while adapter.report_status()["stored"] < 11:
        wait_for(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    log = redis.call(b"SLOWLOG", b"GET", b"-1")
    seen = [entry[3] for entry in reversed(log) if entry[3][0] in (b"GET", b"SET")]
    order = [
        "store" if words[0] == b"SET" else kinds[Kind(int(words[1].split(b"@")[2]))]
        for words in seen
    ]
    assert order == ["store", *["urgent"] * 6, *["load"] * 3, "store"]


def test_bulk_gives_way_between_steps_to_what_is_urgent(redis_server):
    gate = UrgentGate(hold_s=3600)
    driver = Driver(redis_server.url, gate=gate)
    bulk, urgent = key_of(1), key_of(2, Kind.HIDDEN)
    driver.store((bulk, 8 << 20), (urgent, 8 << 20))
    with gate.urgent():
        waiting = driver.adapter.submit_load_task([bulk], [Memory(bytes(8 << 20))])
        storing = driver.adapter.submit_store_task([key_of(3)], [Memory(b"x")])
        assert driver.load((urgent, 8 << 20)) == [True]
        assert driver.lookup([bulk]) == [True]
        assert driver.adapter.query_load_result(waiting) is None
        assert driver.adapter.pop_completed_store_tasks() == {}
    adapter = driver.adapter
    assert wait_for(
        adapter.get_load_event_fd(), lambda: adapter.query_load_result(waiting)
    ).popcount()
    assert storing in wait_for(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks)
    adapter.close()


def test_loads_that_nobody_waits_for_are_taken_back(open_driver, redis_server):
    driver = open_driver(redis_server.url, workers=1)
    driver.store((key_of(1), 10), (key_of(2), 10))
    redis_server.pause()
    adapter = driver.adapter
    adapter.submit_store_task([key_of(9)], [Memory(b"x" * 10)])
    driver.until(lambda status: not status["shards"][0]["queued"])  # the one worker has it
    first = adapter.submit_load_task([key_of(1), key_of(2)], [Memory(bytes(10))] * 2)
    other = adapter.submit_load_task([key_of(2)], [Memory(bytes(10))])
    adapter.cancel([key_of(1)])
    assert driver.listener.missed == [(key_of(1), Miss.LATE)]
    redis_server.resume()
    for task, came in ((first, [2]), (other, [2])):
        bitmap = wait_for(
            adapter.get_load_event_fd(), lambda task=task: adapter.query_load_result(task)
        )
        keys = [key_of(1), key_of(2)] if task == first else [key_of(2)]
        assert bitmap.gather(keys) == [key_of(i) for i in came]
    assert (driver.status("loads"), driver.status("cancelled")) == (3, 1)


def test_lookups_pass_everything(open_driver, redis_server):
    driver = open_driver(redis_server.url, workers=1)
    keys = [key_of(i) for i in range(400)]
    adapter = driver.adapter
    adapter.submit_store_task(keys, [Memory(bytes(1 << 20)) for _ in keys])
    driver.lookup(keys)
    assert adapter.pop_completed_store_tasks() == {}


def test_closing_ends_tasks_under_way(redis_server):
    driver = Driver(redis_server.url)
    redis_server.pause()
    driver.adapter.submit_store_task([key_of(1), key_of(2)], [Memory(b"x")] * 2)
    driver.adapter.close()
    assert driver.listener.failed == [key_of(1), key_of(2)]
