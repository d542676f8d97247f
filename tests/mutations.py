"""Frames that are almost right: bytes and messages changed at random, from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_EDGES = (0, 1, 2, 63, 64, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_WIDE = (*_EDGES, 1 << 32, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


def mutated_bytes(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """`data` with one to four changes; `others` are what it may be spliced with."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        rng.choice(_CHANGES)(out, rng, others)
    return bytes(out)


def _flip(out: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    if out:
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)


def _set(out: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    if out:
        out[rng.randrange(len(out))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def _number(out: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    size = rng.choice((2, 4, 8))
    at = rng.randrange(len(out) + 1)
    out[at : at + size] = (rng.choice(_WIDE) % (1 << 8 * size)).to_bytes(size, "little")


def _cut(out: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    del out[rng.randrange(len(out) + 1) :]


def _remove(out: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    at = rng.randrange(len(out) + 1)
    del out[at : at + rng.randrange(1, 40)]


def _insert(out: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    at = rng.randrange(len(out) + 1)
    out[at:at] = rng.randbytes(rng.randrange(1, 40))


def _repeat(out: bytearray, rng: random.Random, _: Sequence[bytes]) -> None:
    at = rng.randrange(len(out) + 1)
    out[at:at] = out[at : at + rng.randrange(1, 200)]


def _splice(out: bytearray, rng: random.Random, others: Sequence[bytes]) -> None:
    if others:
        other = rng.choice(others)
        out[rng.randrange(len(out) + 1) :] = other[rng.randrange(len(other) + 1) :]


_CHANGES = (_flip, _flip, _set, _number, _cut, _remove, _insert, _repeat, _splice)


def mutated_message(message: Message, rng: random.Random) -> bytes:
    """A message with some of its fields changed, and now and then its bytes as well."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change_field(copy, rng)
    data = copy.SerializeToString()
    return mutated_bytes(data, rng) if rng.random() < 0.3 else data


def _change_field(message: Message, rng: random.Random) -> None:
    fields = message.DESCRIPTOR.fields
    if not fields:
        return
    field = rng.choice(fields)
    if field.is_repeated:
        _change_list(getattr(message, field.name), field, rng)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        if rng.random() < 0.2:
            message.ClearField(field.name)
        else:
            _change_field(getattr(message, field.name), rng)
    elif rng.random() < 0.1:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, _value(field, getattr(message, field.name), rng))


def _change_list(items: object, field: FieldDescriptor, rng: random.Random) -> None:
    if field.type != FieldDescriptor.TYPE_MESSAGE or field.message_type.GetOptions().map_entry:
        return
    what = rng.randrange(4)
    if items and what == 0:
        del items[rng.randrange(len(items))]
    elif items and what == 1:
        items.append(items[rng.randrange(len(items))])
    elif items and what == 2:
        _change_field(items[rng.randrange(len(items))], rng)
    else:
        _change_field(items.add(), rng)


def _value(field: FieldDescriptor, old: object, rng: random.Random) -> object:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return mutated_bytes(old, rng)
    if field.type == FieldDescriptor.TYPE_STRING:
        return "".join(chr(rng.randrange(1, 0xD800)) for _ in range(rng.randrange(80)))
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return rng.choice((0.0, -1.0, 1e-300, 1e30, float("inf"), float("nan")))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return not old
    if field.type == FieldDescriptor.TYPE_ENUM:
        return rng.choice((0, 1, 2, 3, 77, -1, (1 << 31) - 1))
    limit = 1 << (64 if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64 else 32)
    return (rng.choice(_WIDE) if rng.random() < 0.7 else old + 1) % limit
