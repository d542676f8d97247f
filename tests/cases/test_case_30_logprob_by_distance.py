"""sglang PR 34760: a state ahead of its place moved log-probabilities by up to 6.9, for 700 tokens.

`benchmarks/quality.py` publishes |delta logprob| by distance from the boundary.
"""

import pytest
from mini_served import figures

pytestmark = pytest.mark.model

MEAN_BOUND, MAX_BOUND = 1e-5, 1e-4
"""Nats, fp32."""


@pytest.mark.parametrize("name", ["retrieval", "state"])
def test_exact_moves_no_logprob_at_any_distance_and_approximations_do(name):
    found = figures(name, "text", 256, ("full", "zero", "tail 5%", "exact"))
    for bucket in found["exact"]["by_distance"]:
        assert bucket["mean"][0] <= MEAN_BOUND, bucket
        assert bucket["max"] <= MAX_BOUND, bucket
    for column in ("zero", "tail 5%"):
        near = found[column]["by_distance"][:4]
        assert max(bucket["max"] for bucket in near) > 100 * MAX_BOUND, column


def test_what_a_tail_misses_fades_with_distance_where_attention_retrieves():
    found = figures("retrieval", "text", 256, ("full", "tail 1%"), contexts=3)
    buckets = found["tail 1%"]["by_distance"]
    assert [bucket["tokens"][0] for bucket in buckets] == [1, 2, 3, 5, 9, 17, 33, 65, 129]
    assert buckets[-1]["mean"][0] < buckets[0]["mean"][0] / 5
