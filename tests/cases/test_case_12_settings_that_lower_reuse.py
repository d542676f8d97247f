"""sglang#37834: turning on one flag changed what could be reused, and nobody was told.

Of the vLLM connector; the engine's own flags: `tests/vllm_connector/test_hits.py`.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from vllm_fakes import STORED, answered, engine_config, incoming, leave, scheduler_side

from tailreplay.connector.vllm_config import APPROXIMATE, check_supported
from tailreplay.store import serve_in_thread

SETTINGS = {
    "caching": (False, True),
    "block_tokens": (256, 1600),
    "mode": ("exact", "tail", "auto", "zero"),
    "strict": (True, False),
    "store_hiddens": (None, True, False),
}
COMBINATIONS = [dict(zip(SETTINGS, values, strict=True)) for values in product(*SETTINGS.values())]


def is_refused(chosen: dict[str, Any]) -> bool:
    """The one reason: approximate numbers would enter a cache that calls them exact."""
    return chosen["caching"] and chosen["strict"] and chosen["mode"] in APPROXIMATE


def engine(address: str, chosen: dict[str, Any]) -> Any:
    return engine_config(address, **{k: v for k, v in chosen.items() if k != "block_tokens"})


def test_every_combination_uses_all_that_is_stored_or_does_not_start():
    with serve_in_thread() as server:
        asked = incoming([*STORED[:777], *range(5000, 5050)])
        side = scheduler_side(server.address)
        leave(server.address, side._lookups.namespaces.of(asked), 1000, 512, hiddens=True)
        side.close()
        for chosen in COMBINATIONS:
            if is_refused(chosen):
                with pytest.raises(ValueError, match="--no-enable-prefix-caching, or"):
                    check_supported(engine(server.address, chosen))
            else:
                check_supported(engine(server.address, chosen))
                side = scheduler_side(server.address, **chosen)
                assert answered(side, asked) == (777, True), chosen
                side.close()
    assert 0 < sum(map(is_refused, COMBINATIONS)) < len(COMBINATIONS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_replay_token", 0),
        ("checkpoint_tokens", 0),
        ("replay_ratio", 0),
        ("max_step_tokens", 1),
        ("mode", "fast"),
    ],
)
def test_a_setting_that_is_misspelt_or_out_of_range_is_named_at_start(name: str, value: Any):
    with pytest.raises(ValueError, match=name):
        check_supported(engine_config("unix:///nowhere.sock", **{name: value}))
