"""LMCache#1139, #1095, #2581, vllm PR 51875: names that hang on a hash seed never hit."""

from case_helpers import in_another_process
from keys_child import names

WANTED = {
    "fields": {"model": {"layers": 8, "rope": {"theta": 1e6}}, "weights_id": "w"},
    "ids": list(range(100)),
}

GOLDEN = {
    "namespace": "58aaddccf60e643431bf84561c1dbcd1ea12c1437625c63ce5a08752ca67001b",
    "prefixes": [
        "4c294c50c41a9e1fa97ed5623c32255c38f4ef30f40c8e310aa3964cdb397396",
        "8460f55d4df0d4f5b6e525844ce91b6d307c5931fc2ebcae6bdf624f0c81a0df",
        "c4824b100b1d69ec66125781fc1d82fc0e765975894db9e028ebd68995ba6224",
    ],
    "digest": "b9e24f28cbac8b6b",
}


def test_every_process_gives_the_same_names_whatever_its_hash_seed():
    for seed in (1, 4321):
        assert in_another_process("keys_child.py", WANTED, hash_seed=seed) == GOLDEN


def test_names_are_those_of_the_format_in_force():
    assert names(**WANTED) == GOLDEN
