"""How an engine uses the store: mode, replay budget, deadlines."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field

Mode = Literal["exact", "tail", "auto", "zero", "off"]
"""What a request asks for.

exact: the nearest checkpoint, and the gap to the boundary closed exactly.
tail: every state rebuilt from the last k hiddens alone; approximate. Where hiddens are gone, from
    the last k tokens and the stored keys and values.
auto: a tail that keeps to the error budget, where the states hold little from before the nearer
    half of the gap that `exact` would close; else as `exact`. Figures noted when the prefix was
    prefilled tell both beforehand. Plain prefill where a load is expected to take longer.
zero: keys and values with zero states; for evaluation only.
off: plain prefill, the store is not asked.
"""


class CachePolicy(BaseModel):
    """Settings of one engine, or of one request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Annotated[Mode, Field(description="how a hit is used")] = "exact"
    replay_ratio: Annotated[
        float, Field(gt=0, le=1, description="r: tail length as a part of the matched tokens")
    ] = 0.05
    min_tail_tokens: Annotated[int, Field(ge=4, description="k_min: shortest tail, in tokens")] = 64
    error_budget: Annotated[
        float, Field(gt=0, description="relative error of the states that `auto` may spend")
    ] = 0.1
    max_replay_tokens: Annotated[
        int, Field(ge=0, description="longest gap that `exact` closes, in tokens")
    ] = 2048
    max_reprefill_tokens: Annotated[
        int, Field(ge=0, description="longest gap that is prefilled again, not replayed, in tokens")
    ] = 256
    weigh_time: Annotated[
        bool,
        Field(
            description="whether `auto` prefills instead where loading is expected to take longer, "
            "by what this engine has measured lately"
        ),
    ] = True
    exact_repair: Annotated[
        bool, Field(description="whether the state behind a tail is rebuilt exactly when idle")
    ] = True
    prefill_chunk_tokens: Annotated[
        int, Field(ge=64, description="prefill step, in tokens; a checkpoint is kept after each")
    ] = 1024
    device_pool_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="memory of the model's device for what was used last, so that it is not "
            "loaded again, bytes; the engine's own, a request's is not looked at; 0 = none",
        ),
    ] = 0
    match_timeout_s: Annotated[float, Field(gt=0, description="deadline of a lookup, s")] = 0.25
    stall_timeout_s: Annotated[
        float, Field(gt=0, description="longest pause in a load before it is given up, s")
    ] = 2.0
    put_timeout_s: Annotated[float, Field(gt=0, description="deadline of one write-back, s")] = 60.0

    def with_default_mode(self, mode: str) -> Self:
        """The same policy in a mode that an operator set, if nobody has said one in it.

        Args:
            mode: what the store says; empty, or one that is not known here, changes nothing.
        """
        if "mode" in self.model_fields_set or mode not in get_args(Mode):
            return self
        return self.model_copy(update={"mode": mode})
