"""Payloads in Redis, plain and sealed: nothing but the very value under its key is good."""

import hashlib

import pytest

from tailreplay.store.redis_envelope import ENVELOPE_BYTES, Content, Envelope, Plain, Sealed
from tailreplay.store.sealing import NONCE_BYTES, TAG_BYTES, SealingKeys, key_id

OLD, NEW = bytes(range(32)), bytes(range(32, 64))
PAYLOAD = hashlib.sha256(b"payload").digest() * 20
SEALED = Sealed(SealingKeys([OLD]))


def stored(envelope: Envelope, key: bytes = b"key", payload: bytes = PAYLOAD) -> bytes:
    return b"".join(envelope.wrap(key, memoryview(payload)))


def read(envelope: Envelope, value: bytes, key: bytes = b"key") -> tuple[Content, bytes]:
    """What a reader of a payload of PAYLOAD's length makes of a value."""
    payload = memoryview(bytearray(b"\xee" * len(PAYLOAD)))
    room = envelope.room(payload)
    if len(value) != sum(map(len, room)):
        return Content.WRONG, b""
    at = 0
    for part in room:
        part[:] = value[at : at + len(part)]
        at += len(part)
    return envelope.unwrap(key, room, payload), bytes(payload)


@pytest.mark.parametrize("envelope", [Plain(), SEALED], ids=["plain", "sealed"])
def test_what_was_stored_comes_back_and_any_flipped_bit_is_wrong(envelope):
    value = stored(envelope)
    assert read(envelope, value) == (Content.GOOD, PAYLOAD)
    for bit in [*range(8 * 64), 8 * len(value) - 1]:
        damaged = bytearray(value)
        damaged[bit // 8] ^= 1 << bit % 8
        assert read(envelope, bytes(damaged))[0] is not Content.GOOD


@pytest.mark.parametrize("envelope", [Plain(), SEALED], ids=["plain", "sealed"])
def test_a_value_under_anothers_key_is_wrong(envelope):
    assert read(envelope, stored(envelope), b"kez")[0] is Content.WRONG


def test_a_plain_envelope_is_laid_out_as_its_page_says():
    assert bytes(Plain().wrap(b"123456789", memoryview(b""))[0]).hex() == (
        "54525631010000000000000000000000839206e30000000000000000010a2f02"
    )


def test_a_sealed_envelope_is_laid_out_as_its_page_says():
    value = stored(SEALED)
    assert value[:ENVELOPE_BYTES].hex() == (
        "54525631010100008002000000000000d04123e00000000000000000e4c21f6a"
    )
    assert value[16:20] == key_id(OLD)
    assert len(value) == ENVELOPE_BYTES + NONCE_BYTES + len(PAYLOAD) + TAG_BYTES
    assert PAYLOAD[:32] not in value
    assert stored(SEALED)[ENVELOPE_BYTES:] != value[ENVELOPE_BYTES:]  # another nonce


def test_a_new_key_seals_while_an_old_one_opens():
    both, new = Sealed(SealingKeys([NEW, OLD])), Sealed(SealingKeys([NEW]))
    assert read(both, stored(SEALED)) == (Content.GOOD, PAYLOAD)
    assert read(new, stored(both)) == (Content.GOOD, PAYLOAD)
    assert read(new, stored(SEALED))[0] is Content.FOREIGN
    assert read(SEALED, stored(new))[0] is Content.FOREIGN


def test_plain_and_sealed_never_pass_for_each_other():
    assert read(Plain(), stored(SEALED))[0] is Content.WRONG
    assert read(SEALED, stored(Plain()))[0] is Content.WRONG


def test_a_key_of_another_length_is_refused():
    with pytest.raises(ValueError, match="31 bytes, wanted 32"):
        SealingKeys([OLD, bytes(31)])
