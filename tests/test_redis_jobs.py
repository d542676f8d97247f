"""The order of work on one Redis server, without one."""

from tailreplay.store.redis_jobs import FLIGHT_BYTES, JobQueue, Load, Priority, Store

MIB = 1 << 20


def load(number: int, size: int = MIB, *, urgent: bool = False) -> Load:
    return Load(b"%d" % number, memoryview(bytes(size)), urgent, lambda outcome: None)


def store(number: int) -> Store:
    return Store(b"%d" % number, memoryview(b"x"), lambda stored: None)


def filled(*jobs: Load | Store) -> JobQueue:
    queue = JobQueue()
    for job in jobs:
        queue.add(job)
    return queue


def taken(queue: JobQueue) -> list[list[bytes]]:
    batches = []
    while len(queue):
        batches.append([job.key for job in queue.take()])
    return batches


def test_urgent_loads_come_first_then_loads_then_stores_by_age():
    queue = filled(store(1), load(2), load(3, urgent=True), store(4), load(5, urgent=True))
    assert taken(queue) == [[b"3", b"5"], [b"2"], [b"1"], [b"4"]]


def test_loads_go_out_together_up_to_the_bytes_in_flight():
    step = FLIGHT_BYTES // MIB
    queue = filled(*(load(i) for i in range(step + 1)))
    assert [len(batch) for batch in taken(queue)] == [step, 1]
    assert taken(filled(load(1, FLIGHT_BYTES + 1), load(2, 1))) == [[b"1"], [b"2"]]


def test_a_worker_for_urgent_loads_sees_only_those():
    queue = filled(load(1))
    assert (queue.has(Priority.URGENT_LOAD), queue.has(Priority.LOAD)) == (False, True)
    queue.add(load(2, urgent=True))
    assert queue.has(Priority.URGENT_LOAD)


def test_loads_can_be_taken_back_wherever_they_stand():
    queue = filled(load(1), load(2), store(2), load(3, urgent=True), load(2, urgent=True))
    assert sorted(job.priority for job in queue.remove_loads(lambda job: job.key == b"2")) == [
        Priority.URGENT_LOAD,
        Priority.LOAD,
    ]
    assert taken(queue) == [[b"3"], [b"1"], [b"2"]]


def test_stores_can_be_taken_back_those_alone_and_those_of_the_same_key_stay():
    first, second, third = store(1), store(1), store(2)
    queue = filled(first, load(1), second, third)
    assert queue.stores_among({second, third, store(1)}) == [second, third]
    assert queue.remove_stores({second, store(1)}) == [second]
    assert taken(queue) == [[b"1"], [b"1"], [b"2"]]
    assert queue.remove_stores({first}) == []
