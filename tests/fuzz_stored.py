"""Mutated bytes at rest: a change of a stored object, a value in Redis or a manifest is seen."""

from __future__ import annotations

from contextlib import suppress

from fuzz_golden import GOLDEN, Fuzz, WrongHit
from mutations import mutated_bytes

from tailreplay.store.errors import IntegrityError
from tailreplay.store.header import parse_header, verify_object
from tailreplay.store.manifest_form import Entry, manifest_key, parsed_manifest
from tailreplay.store.manifest_seal import MARKS, Encrypted
from tailreplay.store.objects import Kind, Provenance
from tailreplay.store.redis_envelope import Content, Envelope, Plain, Sealed
from tailreplay.store.sealing import SealingKeys

KEYS = SealingKeys([bytes(range(32))])


def headers(fuzz: Fuzz, frames: int) -> None:
    """Stored objects: a change is seen, wherever it is."""
    objects = [(span, GOLDEN.object(*span)) for span in GOLDEN.spans()]
    others = [data for _, data in objects]
    for _ in range(frames):
        (kind, _, end), data = fuzz.rng.choice(objects)
        changed = mutated_bytes(data, fuzz.rng, others)
        fuzz.counts["headers sent"] += 1
        with suppress(IntegrityError):
            parse_header(changed)
        try:
            verify_object(memoryview(changed), GOLDEN.name(kind, end))
        except IntegrityError:
            continue
        if changed != data:
            raise WrongHit("a changed object passes for the one that was stored")


def envelopes(fuzz: Fuzz, frames: int) -> None:
    """Values of Redis, plain and sealed: a change of value or key is seen."""
    payload = GOLDEN.object(Kind.HIDDEN, 64, 128)
    key = b"model|kv@00000000@1@" + bytes(range(32))
    for envelope in (Plain(), Sealed(KEYS)):
        value = b"".join(envelope.wrap(key, memoryview(payload)))
        for _ in range(frames // 2):
            changed, name = mutated_bytes(value, fuzz.rng), key
            if fuzz.rng.random() < 0.2:
                changed, name = value, mutated_bytes(key, fuzz.rng)
            fuzz.counts["envelopes sent"] += 1
            if is_intact(envelope, name, changed, len(payload)) and (changed, name) != (
                value,
                key,
            ):
                raise WrongHit("a changed value passes for the one that was stored")


def manifests(fuzz: Fuzz, frames: int) -> None:
    """Manifests: a change is a miss of that field, and what a forger marks is still parsed."""
    names = GOLDEN.namespace + GOLDEN.chain.prefix_hash(256)
    key = manifest_key("tailreplay:", GOLDEN.namespace, GOLDEN.chain.prefix_hash(256))
    plain = _manifest_fields()
    for seal in (MARKS, Encrypted(KEYS)):
        good = {f: seal.wrap(key, f, v) for f, v in plain.items()}
        wanted = parsed_manifest(key, names, good, seal)
        if wanted is None or len(wanted[1]) != len(plain) - 1:
            raise AssertionError("the golden manifest can not be read")
        for _ in range(frames // 4):
            fuzz.counts["manifests sent"] += 2
            name = fuzz.rng.choice(list(plain))
            value = mutated_bytes(plain[name], fuzz.rng, list(plain.values()))
            forged = good | {name: seal.wrap(key, name, value)}
            parsed_manifest(key, names, forged, seal)
            value = mutated_bytes(good[name], fuzz.rng, list(good.values()))
            found = parsed_manifest(key, names, good | {name: value}, seal)
            lost = [e for e in wanted[1] if e.field != name.decode()]
            if found is not None and value != good[name] and found != (wanted[0], lost):
                raise WrongHit(f"a changed field {name!r} is believed")


def is_intact(envelope: Envelope, key: bytes, value: bytes, payload_bytes: int) -> bool:
    """Whether a reader takes a value for what was stored under a key."""
    payload = memoryview(bytearray(payload_bytes))
    room = envelope.room(payload)
    if len(value) != sum(map(len, room)):
        return False  # as the connection says before anything is read
    at = 0
    for part in room:
        part[:] = value[at : at + len(part)]
        at += len(part)
    return envelope.unwrap(key, room, payload) is Content.GOOD


def _manifest_fields() -> dict[bytes, bytes]:
    """A manifest's values without their seals, made by the store's own packing."""
    from tailreplay.store.manifest_form import pack_block, pack_entry
    from tailreplay.store.views import Block

    hash_at = GOLDEN.chain.prefix_hash
    pages = tuple(hash_at(end) for end in (64, 128, 192, 256))
    block = Block(GOLDEN.namespace, hash_at(256), hash_at(0), 0, GOLDEN.digests[: 256 * 8], pages)
    digest = GOLDEN.digests[299 * 8 : 300 * 8]
    entries = [
        Entry("k", 4000, Provenance.EXACT),
        Entry("2", 900, Provenance.EXACT, tail_figures=bytes(range(12))),
        Entry(f"c300:{digest.hex()}", 77, Provenance.APPROXIMATE, hash_at(300)),
    ]
    return {b"b": pack_block(block)} | {e.field.encode(): pack_entry(e) for e in entries}
