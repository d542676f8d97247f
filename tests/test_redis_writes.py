"""Writes to Redis that are taken back: whole tasks of which nothing is under way."""

from lmcache.v1.distributed.api import ObjectKey

from tailreplay.store.redis_jobs import JobQueue, Store
from tailreplay.store.redis_writes import RedisWrites, Write


class Shard:
    """Has a queue, which nobody works at; counts how often it is looked through."""

    def __init__(self) -> None:
        self.jobs = JobQueue()
        self.looks = 0

    def queued(self, stores) -> list[Store]:
        self.looks += 1
        return self.jobs.stores_among(stores)

    def take_back(self, stores) -> list[Store]:
        self.looks += 1
        return self.jobs.remove_stores(stores)


def key(number: int) -> ObjectKey:
    return ObjectKey(number.to_bytes(32, "big"), "model", 0, 0)


def test_queues_are_looked_through_as_often_for_many_tasks_as_for_one():
    shards, writes = (Shard(), Shard()), RedisWrites()
    tasks = [
        [
            Write(key(2 * task + i), shard, Store(b"", memoryview(b"x"), print))
            for i, shard in enumerate(shards)
        ]
        for task in range(50)
    ]
    for number, task in enumerate(tasks):
        writes.begin(number, task)
        for write in task:
            write.shard.jobs.add(write.store)
    assert shards[1].jobs.take() == [tasks[0][1].store]  # under way, and so its task is
    gone = writes.take_back([task[0].key for task in tasks[:40]] + [key(1000)])
    assert gone == [write for task in tasks[1:40] for write in task]
    assert [shard.looks for shard in shards] == [2, 2]
    assert [len(shard.jobs) for shard in shards] == [11, 10]
    writes.done(0, 1)
    assert writes.take_back([tasks[0][0].key]) == tasks[0][:1]
