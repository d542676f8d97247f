"""What a store answers, as the planner sees it."""

import pytest
from plan_strategies import SHAPE

from tailreplay.connector.plan import plan_fetch
from tailreplay.connector.policy import CachePolicy
from tailreplay.connector.stored import StoredCheckpoint, stored_prefix
from tailreplay.proto import store_pb2 as pb

EXACT, APPROXIMATE = pb.PROVENANCE_EXACT, pb.PROVENANCE_APPROXIMATE


def run(kind, first, end, provenance=EXACT, tier=pb.TIER_CPU):
    return pb.Run(kind=kind, tier=tier, provenance=provenance, first_token=first, end_token=end)


def test_runs_of_both_tiers_are_one_prefix_and_a_hole_ends_it():
    answer = pb.MatchResponse(
        matched_tokens=900,
        leaf=b"leaf",
        runs=[
            run(pb.KIND_KV, 0, 256),
            run(pb.KIND_KV, 256, 512, tier=pb.TIER_REDIS),
            run(pb.KIND_KV, 768, 900),
            run(pb.KIND_HIDDEN, 64, 128),
            run(pb.KIND_HIDDEN, 128, 192, tier=pb.TIER_REDIS),
            run(pb.KIND_HIDDEN, 832, 900),
        ],
    )
    stored = stored_prefix(answer)
    assert (stored.kv_tokens, stored.inexact_tokens) == (512, 0)
    assert stored.hidden == ((64, 192), (832, 900))
    assert plan_fetch(stored, 1000, CachePolicy(), SHAPE).lost == {"kv_missing": 388}


def test_approximate_payload_counts_as_none_and_is_lost_to_provenance():
    answer = pb.MatchResponse(
        matched_tokens=600,
        leaf=b"leaf",
        runs=[
            run(pb.KIND_KV, 0, 256),
            run(pb.KIND_KV, 256, 512, APPROXIMATE),
            run(pb.KIND_HIDDEN, 0, 512, APPROXIMATE),
        ],
        checkpoints=[
            pb.Checkpoint(token=128, provenance=EXACT, prefix_hash=b"a"),
            pb.Checkpoint(token=256, provenance=APPROXIMATE, prefix_hash=b"b"),
        ],
    )
    plan = plan_fetch(stored_prefix(answer), 700, CachePolicy(), SHAPE)
    assert plan.checkpoint == StoredCheckpoint(128, b"a")
    assert plan.used_tokens == 256
    assert plan.lost == {"provenance": 256, "kv_missing": 88}
    tail = plan_fetch(stored_prefix(answer), 700, CachePolicy(mode="tail"), SHAPE)
    assert tail.mode == "miss"
    assert tail.lost == {"hidden_missing": 256, "provenance": 256, "kv_missing": 88}


@pytest.mark.parametrize("size", [1, 5, 7, 31, 102])
def test_figures_of_a_size_that_none_have_are_left_out_and_counted(size):
    known = pb.Run(kind=pb.KIND_HIDDEN, end_token=64, provenance=EXACT, tail_figures=bytes(6))
    rogue = pb.Run(
        kind=pb.KIND_HIDDEN,
        first_token=64,
        end_token=700,
        provenance=EXACT,
        tail_figures=bytes(size),
    )
    runs = [run(pb.KIND_KV, 0, 700), known, rogue]
    stored = stored_prefix(pb.MatchResponse(matched_tokens=700, leaf=b"leaf", runs=runs))
    assert stored.mismatches == 1
    assert (stored.figures_at(64), stored.figures_at(700)) == (bytes(6), b"")
    assert stored.hidden == ((0, 700),)
    for mode in ("auto", "tail", "exact"):
        plan_fetch(stored, 800, CachePolicy(mode=mode, error_budget=0.3), SHAPE)


def test_where_a_prefix_lies_is_told_range_by_range():
    answer = pb.MatchResponse(matched_tokens=512)
    answer.runs.add(kind=pb.KIND_KV, tier=pb.TIER_CPU, first_token=0, end_token=256)
    answer.runs.add(kind=pb.KIND_KV, tier=pb.TIER_REDIS, first_token=256, end_token=512)
    answer.checkpoints.add(token=512, tier=pb.TIER_REDIS)
    stored = stored_prefix(answer)

    def tier(kind, first, end):
        return stored.slowest_tier([pb.Range(kind=kind, first_token=first, end_token=end)])

    assert tier(pb.KIND_KV, 0, 256) == "cpu"
    assert tier(pb.KIND_KV, 0, 257) == tier(pb.KIND_KV, 300, 400) == "redis"
    assert tier(pb.KIND_HIDDEN, 256, 512) == "cpu"
    assert tier(pb.KIND_CHECKPOINT, 511, 512) == "redis"
