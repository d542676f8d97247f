"""LMCache#1139, #1095, #2581, vllm PR 51875: names that hang on a hash seed never hit."""

from case_helpers import in_another_process
from keys_child import names

WANTED = {
    "fields": {"model": {"layers": 8, "rope": {"theta": 1e6}}, "weights_id": "w"},
    "ids": list(range(100)),
}

GOLDEN = {
    "namespace": "a676833010bbfdacefe0c3ed42c3e4785c5745ac9bd78dfaf6b6da720a5bf2d6",
    "prefixes": [
        "70fbedfa01d17df3579e36bcb13ff5f0792153a88a22083815be4ca020860982",
        "d34304c8c620267a87381896ae26549eb48168039193f055759d9496b35c3995",
        "402e97bb02fee7195ba1f7c3edbf9d44540bc876fd6b2a1300385b4f8ebf619b",
    ],
    "digest": "74cb403930f049a9",
}


def test_every_process_gives_the_same_names_whatever_its_hash_seed():
    for seed in (1, 4321):
        assert in_another_process("keys_child.py", WANTED, hash_seed=seed) == GOLDEN


def test_names_are_those_of_the_first_release():
    assert names(**WANTED) == GOLDEN
