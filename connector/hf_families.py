"""What differs between Transformers' hybrid families: where their Gated DeltaNets keep weights.

Alike in all of them: `linear_attn` behind an `input_layernorm`, a conv state of the raw q, k and v
in this order, and a recurrent state `[HV, K, V]` in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tailreplay.connector.hf_cuts import RULE, calls_rule
from tailreplay.replay.state_only import StateWeights


class UnsupportedModel(ValueError):
    """The model is of a family, or built in a way, that the engine does not know."""


@dataclass(frozen=True, slots=True)
class Family:
    """How to read one family's modules.

    Attributes:
        projections: modules of a Gated DeltaNet whose weights `state_weights` reads.
        state_weights: gives the weights of a Gated DeltaNet that its state depends on.
        decay: names its module that projects rows to the decay.
        decay_rows: gives the part `[T, HV]` that is the decay's of what `decay` puts out, `[T, .]`.
    """

    projections: Sequence[str]
    state_weights: Callable[[Any], StateWeights]
    decay: str
    decay_rows: Callable[[Any, Tensor], Tensor] = lambda _attention, rows: rows

    def check(self, attention: Any) -> None:  # noqa: ANN401 - a Gated DeltaNet module
        """Make sure that the weights say all of what the module does, and that it can be stopped.

        Raises:
            UnsupportedModel: a projection is not a plain `torch.nn.Linear`, the convolution's
                activation is not SiLU, or the rule is not called by the name that is known.
        """
        for name in self.projections:
            kind = type(getattr(attention, name))
            if kind is not torch.nn.Linear:
                raise UnsupportedModel(f"{name} is a {kind.__name__}, wanted torch.nn.Linear")
        if attention.activation != "silu":
            raise UnsupportedModel(f"activation is {attention.activation!r}, wanted 'silu'")
        if not calls_rule(attention):
            raise UnsupportedModel(f"{type(attention).__module__} has no {RULE}, wanted one")


def family_of(model: Any) -> Family:  # noqa: ANN401 - any Transformers model
    """Look up the family of a causal LM.

    Raises:
        UnsupportedModel: it is none of `FAMILIES`.
    """
    kind = getattr(model.config, "model_type", None)
    if kind not in FAMILIES:
        raise UnsupportedModel(f"model_type is {kind!r}, wanted one of {tuple(FAMILIES)}")
    return FAMILIES[kind]


def _qwen3_5(attention: Any) -> StateWeights:  # noqa: ANN401 - a Gated DeltaNet module
    parts = [attention.key_dim, attention.key_dim, attention.value_dim]
    qkv = attention.in_proj_qkv.weight.split(parts)
    return _weights(attention, (*qkv, attention.in_proj_a.weight, attention.in_proj_b.weight))


def _qwen3_next(attention: Any) -> StateWeights:  # noqa: ANN401 - a Gated DeltaNet module
    """Gather what lies interleaved: q, k, v, z of one key head after the other, and b, a."""
    heads, keys = attention.num_k_heads, attention.head_k_dim
    per_key = attention.num_v_heads // heads
    values = per_key * attention.head_v_dim
    qkvz = attention.in_proj_qkvz.weight.unflatten(0, (heads, -1))
    ba = attention.in_proj_ba.weight.unflatten(0, (heads, -1))
    q, k, v, _ = qkvz.split([keys, keys, values, values], dim=1)
    b, a = ba.split(per_key, dim=1)
    return _weights(attention, [x.flatten(0, 1) for x in (q, k, v, a, b)])


def _olmo_hybrid(attention: Any) -> StateWeights:  # noqa: ANN401 - a Gated DeltaNet module
    names = ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj")
    weights = [getattr(attention, name).weight for name in names]
    return _weights(attention, weights, beta_max=2.0 if attention.allow_neg_eigval else 1.0)


def _weights(
    attention: Any,  # noqa: ANN401 - a Gated DeltaNet module
    qkvab: Sequence[Tensor],
    beta_max: float = 1.0,
) -> StateWeights:
    """Add what goes by the same names in every family."""
    q, k, v, a, b = qkvab
    return StateWeights(
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        conv=attention.conv1d.weight.squeeze(1),
        a_log=attention.A_log,
        dt_bias=attention.dt_bias,
        key_heads=attention.num_k_heads,
        beta_max=beta_max,
    )


def _qwen3_next_decay(attention: Any, rows: Tensor) -> Tensor:  # noqa: ANN401 - as above
    per_key = attention.num_v_heads // attention.num_k_heads
    ba = rows.reshape(len(rows), attention.num_k_heads, -1)
    return ba[..., per_key:].flatten(1)


FAMILIES = {
    "qwen3_5_text": Family(("in_proj_qkv", "in_proj_a", "in_proj_b"), _qwen3_5, "in_proj_a"),
    "qwen3_next": Family(
        ("in_proj_qkvz", "in_proj_ba"), _qwen3_next, "in_proj_ba", _qwen3_next_decay
    ),
    "olmo_hybrid": Family(
        ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj"),
        _olmo_hybrid,
        "a_proj",
    ),
}
"""By `config.model_type`: the families that are known to work."""
