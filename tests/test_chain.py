"""The hash chain and the running digests: fixed for ever, the same in every process."""

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from store_objects import running_digests

from tailreplay.store.chain import PrefixChain, common_tokens, digest_key
from tailreplay.store.tokens import extended_tokens

NAMESPACE = bytes(range(32))
TOKENS = extended_tokens(range(1, 131), {5: (1 << 64) - 1, 100: 1 << 32})

GOLDEN_HASHES = {
    0: "5560fac8403318bbd112292e19c5d14bc0337025afc6d498265e27f2516050da",
    1: "55f87a7c449a5fedc92ab4d606b65e6024214654ac0f7b953b1c8f29269531d0",
    5: "ac6605846809f793b983b888e0e17a0ac3d7769d23e8a368fbc8d3efc2d46ffc",
    6: "e4e38fbbbccab85a8b775507c323008c3643248f360e9b4aab66355ea7752182",
    63: "6d5c2699d77eb0b76498964458bad6c3bb53b04a484b5cc18214115efb9cad5a",
    64: "a9aace14333881007a65aa1b1ce1bc4da87292320c192ff147ad686062a6815a",
    65: "21dad535d0470bb23852336f1a1688ffe6ae3f4da851bf818259722b65d1132b",
    128: "47841e10b6ca1178431f087ba923ced459adc2d43aeb1a2a2b0b11b463555ff9",
    129: "c4d8550f253ebd1ca76bbcd81d77a914d4be3c3c9ca94ed1df4b58c2d0c1e549",
    130: "339c229294a22679031a724c760175a94b6d21fb76a833cc6e06cc41f0e07f1d",
}
GOLDEN_KEY = "476409efcfceac64fbc55c75b1d4fb1d"
GOLDEN_SECRET_KEY = "1c07874b8c61b16b994fb03aa67546bd"
GOLDEN_DIGESTS = {
    0: "66d11ae41f4f67f4",
    1: "e498fafb53f236fc",
    63: "425bbefe35ccd2d2",
    64: "77165a2e40b3a07e",
    129: "7f884f9b66297b4c",
}

sequences = st.lists(st.integers(0, 3), max_size=200)


@pytest.mark.parametrize("end_token", GOLDEN_HASHES)
def test_prefix_hashes_are_the_golden_ones(end_token):
    assert PrefixChain(NAMESPACE, TOKENS).prefix_hash(end_token).hex() == GOLDEN_HASHES[end_token]


def name_by_the_page(namespace: bytes, tokens: list[int]) -> bytes:
    """docs/format.md in as many words."""
    key = blake3(b"tailreplay prefix chain v1").digest()
    last = blake3(namespace, key=key).digest()
    for at in range(0, len(tokens), 64):
        page = b"".join(token.to_bytes(8, "little") for token in tokens[at : at + 64])
        last = blake3(last + page, key=key).digest()
    return last


@given(st.lists(st.integers(0, (1 << 64) - 1), max_size=200))
def test_names_are_those_of_the_format_page(tokens):
    chain = PrefixChain(NAMESPACE, np.array(tokens, np.uint64))
    assert chain.prefix_hash(len(tokens)) == name_by_the_page(NAMESPACE, tokens)


def test_whole_pages_are_listed():
    pages = PrefixChain(NAMESPACE, TOKENS).pages
    assert [page.hex() for page in pages] == [GOLDEN_HASHES[64], GOLDEN_HASHES[128]]


def test_digest_keys_are_the_golden_ones():
    assert digest_key(NAMESPACE).hex() == GOLDEN_KEY
    assert digest_key(NAMESPACE, b"secret").hex() == GOLDEN_SECRET_KEY


def test_running_digests_are_the_golden_ones():
    digests = running_digests(digest_key(NAMESPACE), TOKENS)
    assert len(digests) == 8 * 130
    assert {i: digests[8 * i : 8 * i + 8].hex() for i in GOLDEN_DIGESTS} == GOLDEN_DIGESTS


@given(st.lists(st.integers(0, 3), max_size=200), st.integers(0, 200))
def test_a_prefix_has_the_same_names_alone_and_in_a_longer_sequence(ids, at):
    end = min(at, len(ids))
    whole = PrefixChain(NAMESPACE, extended_tokens(ids))
    alone = PrefixChain(NAMESPACE, extended_tokens(ids[:end]))
    assert whole.prefix_hash(end) == alone.prefix_hash(end)
    key = digest_key(NAMESPACE)
    digests = running_digests(key, extended_tokens(ids))
    assert digests[: 8 * end] == running_digests(key, extended_tokens(ids[:end]))


@given(sequences, sequences)
def test_digests_agree_exactly_as_far_as_the_tokens_do(a, b):
    key = digest_key(NAMESPACE)
    shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    shared = min(len(a), len(b)) if shared is None else shared
    runs = [running_digests(key, extended_tokens(ids)) for ids in (a, b)]
    assert common_tokens(*runs) == shared
    later = zip(*(np.frombuffer(run, "<u8")[shared:] for run in runs), strict=False)
    assert all(x != y for x, y in later)  # they never meet again


@given(sequences, sequences)
def test_only_equal_sequences_share_a_name(a, b):
    names = [PrefixChain(NAMESPACE, extended_tokens(x)).prefix_hash(len(x)) for x in (a, b)]
    assert (names[0] == names[1]) == (a == b)


def test_every_prefix_of_a_sequence_has_a_name_of_its_own():
    chain = PrefixChain(NAMESPACE, TOKENS)
    assert len({chain.prefix_hash(n) for n in range(131)}) == 131


def test_another_namespace_gives_other_names_and_digests():
    other = NAMESPACE[:-1] + b"\0"
    assert PrefixChain(other, TOKENS).prefix_hash(64).hex() != GOLDEN_HASHES[64]
    digests = running_digests(digest_key(other), TOKENS)
    assert common_tokens(digests, running_digests(digest_key(NAMESPACE), TOKENS)) == 0


def test_a_key_file_gives_other_digests():
    keys = [digest_key(NAMESPACE), digest_key(NAMESPACE, b"secret")]
    assert common_tokens(*(running_digests(key, TOKENS) for key in keys)) == 0


@pytest.mark.parametrize("end_token", [-1, 131])
def test_a_prefix_that_is_not_there_has_no_name(end_token):
    with pytest.raises(ValueError, match="wanted 0 to 130 tokens"):
        PrefixChain(NAMESPACE, TOKENS).prefix_hash(end_token)
