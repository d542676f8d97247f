"""omlx#825: after a hit of 8,192 tokens a model stopped to emit tool calls.

The canary's format is the miniatures' own: asked ` Emma is`, they give a number.
"""

import pytest
from mini_served import figures
from quality_parts.columns import OFF

pytestmark = pytest.mark.model


@pytest.mark.parametrize("name", ["retrieval", "state"])
def test_an_answer_keeps_its_form_after_a_hit(name):
    hits = ("tail 5%", "auto", OFF, "exact")
    found = figures(name, "needles", 256, ("full", *hits), contexts=6)
    cold = found["full"]["kept"][0]
    assert cold > 0.9
    for column in hits:
        assert found[column]["kept"][0] >= 0.99 * cold, column
