"""What stores tell each other of erasures through Redis, and what one does that comes late."""

import pytest

from tailreplay.store.eraser import Erased
from tailreplay.store.erasure_ledger import Erasure, ErasureLedger, new_erasure_id
from tailreplay.store.erasures import Erasures
from tailreplay.store.errors import StoreUnavailable
from tailreplay.store.namespace import tenant_digest
from tailreplay.store.objects import Kind

pytestmark = pytest.mark.redis

KV = Kind.KV
ACME = tenant_digest("acme")


def here(_: Erasure) -> Erased:
    return Erased()


class NoEraser:
    """Deletes nothing in Redis, since nothing is there."""

    def __init__(self) -> None:
        self.asked: list[Erased] = []
        self.swept: list[Erased] = []

    def drop_again(self, done: Erased, *, overwrite: bool) -> None:
        """Nothing."""

    def sweep_in_redis(self, done: Erased) -> None:
        """Nothing."""
        self.swept.append(done)

    def delete_in_redis(self, done: Erased) -> None:
        """Nothing."""
        self.asked.append(done)


@pytest.mark.parametrize("clears", [False, True])
def test_a_store_that_is_late_to_clear_leaves_redis_as_it_is_by_now(tables, clears):
    asker, eraser = ErasureLedger(tables, b"asker"), NoEraser()
    late = Erasures(ErasureLedger(tables, b"late"), eraser, here)
    late.join()
    erasure_id = new_erasure_id()
    asker.close(erasure_id)
    asker.ask(erasure_id, Erasure(ACME, frozenset(), clears=clears))
    late.tick()
    assert (len(eraser.asked), len(eraser.swept)) == ((0, 1) if clears else (1, 0))


def test_what_a_late_store_has_gone_through_is_deleted_once_redis_answers(tables):
    """Its first try has forgotten whose it was."""
    asker, eraser, spaces = ErasureLedger(tables, b"asker"), NoEraser(), [{b"n" * 32}, set()]

    def once(erasure: Erasure) -> Erased:
        return Erased(namespaces=spaces.pop(0) | erasure.namespaces)

    late = Erasures(ErasureLedger(tables, b"late"), eraser, once)
    late.join()
    delete, eraser.delete_in_redis = eraser.delete_in_redis, away
    erasure_id = new_erasure_id()
    asker.close(erasure_id)
    asker.ask(erasure_id, Erasure(ACME, frozenset()))
    late.tick()
    eraser.delete_in_redis = delete
    late.tick()
    assert [done.namespaces for done in eraser.asked] == [{b"n" * 32}]


def away(_: Erased) -> None:
    raise StoreUnavailable("Redis does not answer")


def test_a_store_that_does_not_answer_is_counted(tables):
    asker = ErasureLedger(tables, b"asker")
    silent, gone = ErasureLedger(tables, b"silent"), ErasureLedger(tables, b"gone")
    silent.live()
    gone.live()
    gone.leave()
    done = Erasures(asker, NoEraser(), here, patience_s=0.1).everywhere(Erasure(ACME, frozenset()))
    assert (done.stores, done.silent_stores) == (1, 1)


def test_a_store_that_lives_no_more_is_not_asked(tables):
    asker, dead = ErasureLedger(tables, b"asker"), ErasureLedger(tables, b"dead")
    dead.live()
    assert asker.others() == {b"dead"}
    tables.client.unlink(tables.key(b"store:dead"))  # its life is over
    assert asker.others() == set()
    assert tables.all(b"stores") == {}


def test_an_erasure_is_known_for_two_days_of_redis_and_until_another(tables):
    ledger = ErasureLedger(tables, b"one")
    first, second, third = (new_erasure_id() for _ in range(3))
    ledger.ask(first, Erasure(ACME, frozenset()))
    ledger.ask(second, Erasure(ACME, frozenset()))
    assert ledger.asked().keys() == {first, second}
    two_days_ms = 2 * 24 * 3600 * 1000
    for key in (b"erasures", b"erasure:" + second):
        assert two_days_ms - 60_000 < tables.client.pttl(tables.key(key)) <= two_days_ms
    tables.client.unlink(tables.key(b"erasure:" + first))  # its two days are over
    ledger.ask(third, Erasure(ACME, frozenset()))
    assert ledger.asked().keys() == {second, third}


def test_an_answer_comes_through_redis_as_it_was(tables):
    done = Erased(overwritten_bytes=7, held=2, left_in_cpu=1, namespaces={b"a" * 32, b"b" * 32})
    done.bulk_files, done.left_in_bulk, done.unlisted = 5, 4, 3
    done.removed["cpu", KV, "objects"] = 3
    done.removed["cpu", KV, "bytes"] = 300
    erasure_id = new_erasure_id()
    one, other = ErasureLedger(tables, b"one"), ErasureLedger(tables, b"other")
    block = Erasure(b"", frozenset([b"s" * 32]), b"h" * 32)
    for what in (
        block,
        Erasure(ACME, frozenset([b"s" * 32, b"t" * 32]), clears=True),
        Erasure(b"", frozenset(), clears=True, everything=True),
    ):
        one.ask(erasure_id, what)
        assert other.asked()[erasure_id] == what
    assert other.answer(erasure_id, done)
    assert one.answers(erasure_id) == {b"other": done}
