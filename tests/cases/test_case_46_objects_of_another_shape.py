"""LMCache#4179, #2774: objects of another size or shape raised in the engine."""

import pytest
from case_helpers import ask, assert_right, fork, policy, prompt, replica
from tiny_models import tiny_qwen

pytestmark = pytest.mark.model

STORED = prompt(300)


@pytest.mark.parametrize(
    ("other", "mode"),
    [({"hidden": 32}, "tail"), ({"layers": 4}, "exact"), ({"layers": 12}, "exact")],
    ids=["narrower hiddens", "fewer layers", "more layers"],
)
def test_a_mismatch_is_a_counted_miss_and_the_answer_is_right(store, engine, other, mode):
    """Shapes are in the namespace; only a name forced to be equal can bring them together."""
    ask(engine, STORED)
    model = tiny_qwen(**other)
    with replica(store.address, model) as odd:
        odd.namespace = engine.namespace
        tokens = fork(STORED, 290)
        out = ask(odd, tokens, policy=policy(mode))
    assert (out.report["mode"], out.report["miss_reason"]) == ("miss", "integrity")
    assert out.report["lost"] == {"integrity": 290}
    assert_right(out, tokens, model)
    again = ask(engine, fork(STORED, 290, seed=2))
    assert again.report["used_tokens"] == 290
