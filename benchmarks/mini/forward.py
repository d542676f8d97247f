"""The model's forward pass in plain torch: what Transformers computes, states open.

Of both families, Qwen3.5 and OLMo-Hybrid; what differs is told by the modules a layer has. Beyond
Transformers it can cut the GDN memory at a token, weaken it everywhere (the warm-up of
training) and hand out or take in states, which the scores need. Tensor letters: B samples,
T tokens, D hidden size, H heads, K and V head dims, C chunk.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import OlmoHybridForCausalLM, Qwen3_5ForCausalLM

Net = Qwen3_5ForCausalLM | OlmoHybridForCausalLM
"""The families of miniatures."""

Rope = tuple[Tensor, Tensor]
"""Cosines and sines of positions."""

CHUNK = 64


class State(NamedTuple):
    """Memory of one GDN layer: the last inputs of its convolution, and S."""

    conv_state: Tensor
    """`[B, channels, 3]`, before the convolution."""
    recurrent_state: Tensor
    """`[B, HV, K, V]`, float32."""


class Memory(NamedTuple):
    """How the GDN layers remember during a forward pass."""

    cut: int | None = None
    """Token at which every GDN state is emptied (FA sees all tokens still)."""
    speedup: float | None = 1.0
    """Factor on the log decay; above 1 forgets faster, None keeps nothing but the convolution."""
    attends: bool = True
    """False leaves the FA sublayers out."""


PLAIN = Memory()
"""What Transformers computes."""


class Stored(NamedTuple):
    """What a prefix cache would keep of a prefill."""

    kv: dict[int, tuple[Tensor, Tensor]]
    """FA layer -> keys after rotary and values, each `[B, H, T, K]`."""
    hidden: dict[int, Tensor]
    """FA layer -> its output `[B, T, D]`; -1 holds the embeddings."""
    states: dict[int, State]
    """GDN layer -> its state after the last token."""


def hidden_states(model: Net, ids: Tensor, memory: Memory = PLAIN) -> Tensor:
    """Final hidden states `[B, T, D]` of `ids` `[B, T]`, before the output matrix."""
    x = model.model.embed_tokens(ids)
    rope = rotary(model, 0, ids.shape[1])
    for block in model.model.layers:
        y = _normed(block, x)
        if not attends(block):
            out = _gdn_in_parts(block.linear_attn, y, memory)
        elif memory.attends:
            out, _ = attention(block.self_attn, y, rope)
        else:
            out = torch.zeros_like(x)
        x = _added(block, x, out)
    return norm(model.model.norm, x)


def extend(
    model: Net,
    ids: Tensor,
    past: Stored | None,
    speedup: float | None = 1.0,
    window: int | None = None,
) -> tuple[Tensor, Stored]:
    """Runs `ids` `[B, T]` after the stored prefix; returns final hidden states and what to keep.

    A GDN layer missing in `past.states` starts empty. With a `window`, FA sees at each of `ids`
    only the last so many tokens, that one included.
    """
    start = next(iter(past.kv.values()))[0].shape[2] if past else 0
    x = model.model.embed_tokens(ids)
    rope = rotary(model, start, start + ids.shape[1])
    new = Stored({}, {-1: x}, {})
    for i, block in enumerate(model.model.layers):
        y = _normed(block, x)
        if attends(block):
            before = past.kv[i] if past else None
            out, new.kv[i] = attention(block.self_attn, y, rope, before, window=window)
        else:
            state = past.states.get(i) if past else None
            out, new.states[i] = gdn(block.linear_attn, y, state, speedup)
        x = _added(block, x, out)
        if attends(block):
            new.hidden[i] = x
    return norm(model.model.norm, x), new


def replay(
    model: Net, hidden: dict[int, Tensor], k: int, speedup: float | None = 1.0
) -> dict[int, State]:
    """GDN states rebuilt from the last `k` stored hidden rows of each replay group; k = 0: none."""
    states: dict[int, State] = {}
    if k == 0:
        return states
    for i, block in enumerate(model.model.layers):
        if attends(block):
            continue
        if i - 1 in hidden:
            x = hidden[i - 1][:, -k:]
        out, states[i] = gdn(block.linear_attn, _normed(block, x), None, speedup)
        x = _added(block, x, out)
    return states


def attends(block: nn.Module) -> bool:
    """Whether a layer is one of full attention."""
    return hasattr(block, "self_attn")


def rotary(model: Net, start: int, stop: int) -> Rope | None:
    """Cosines and sines `[1, stop - start, rotary dims]` of text positions; None without any."""
    positions = torch.arange(start, stop, device=model.lm_head.weight.device).view(1, -1)
    if isinstance(model, Qwen3_5ForCausalLM):
        positions = positions.expand(3, 1, -1)
    embed = model.model.rotary_emb
    return embed(model.lm_head.weight, positions) if embed is not None else None


def norm(module: nn.Module, x: Tensor) -> Tensor:
    """RMS norm; Qwen3.5 stores its weight minus one."""
    if hasattr(module, "variance_epsilon"):
        return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)
    return F.rms_norm(x, (x.shape[-1],), 1.0 + module.weight, module.eps)


def attention(
    layer: nn.Module,
    x: Tensor,
    rope: Rope | None,
    past: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """FA sublayer on `x` `[B, T, D]`, normed; returns its output and all keys and values.

    `past` stands before x's own keys and values; `window` is how many tokens are seen from each,
    None = all.
    """
    q, k, gate = _queries(layer, x)
    q, k = _rotate(q.transpose(1, 2), rope), _rotate(k.transpose(1, 2), rope)
    v = layer.v_proj(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2)
    mask = None
    if past is not None:
        k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
    ahead = k.shape[2] - q.shape[2]
    if ahead or window is not None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(ahead)
    if mask is not None and window is not None:
        mask = mask.triu(ahead + 1 - window)
    groups = layer.num_key_value_groups
    out = F.scaled_dot_product_attention(
        q,
        k.repeat_interleave(groups, 1),
        v.repeat_interleave(groups, 1),
        attn_mask=mask,
        is_causal=mask is None,
        scale=layer.scaling,
    )
    out = out.transpose(1, 2)
    if gate is not None:
        out = out * gate.sigmoid()
    return layer.o_proj(out.flatten(2)), (k, v)


def gdn(
    layer: nn.Module, x: Tensor, state: State | None, speedup: float | None = 1.0
) -> tuple[Tensor, State]:
    """GDN sublayer on `x` `[B, T, D]`, normed; returns its output and the state after it."""
    qkv, z, a, beta = _gdn_inputs(layer, x)
    qkv = qkv.transpose(1, 2)
    width = layer.conv_kernel_size - 1
    qkv = F.pad(qkv, (width, 0)) if state is None else torch.cat((state.conv_state, qkv), 2)
    conv_state = qkv[:, :, -width:]
    qkv = F.silu(F.conv1d(qkv, layer.conv1d.weight, groups=qkv.shape[1]))
    q, k, v = qkv.transpose(1, 2).split((layer.key_dim, layer.key_dim, layer.value_dim), -1)
    q = _unit(q.unflatten(-1, (-1, layer.head_k_dim))).transpose(1, 2) * layer.head_k_dim**-0.5
    k = _unit(k.unflatten(-1, (-1, layer.head_k_dim))).transpose(1, 2)
    v = v.unflatten(-1, (-1, layer.head_v_dim)).transpose(1, 2)
    beta = beta.transpose(1, 2)
    recurrent_state = (
        state.recurrent_state
        if state
        else v.new_zeros(v.shape[0], v.shape[1], layer.head_k_dim, layer.head_v_dim)
    )
    if speedup is None:
        repeat = v.shape[1] // k.shape[1]
        read = (q * k).sum(-1).repeat_interleave(repeat, 1) * beta
        out = read.unsqueeze(-1) * v
    else:
        decay = layer.A_log.exp() * F.softplus(a + layer.dt_bias)
        g = -speedup * decay.transpose(1, 2)
        out, recurrent_state = delta_rule((q, k, v), g, beta, recurrent_state)
    out = out.transpose(1, 2)
    gate = F.silu(z.unflatten(-1, (-1, layer.head_v_dim)))
    if hasattr(layer, "o_norm"):
        out, last = norm(layer.o_norm, out), layer.o_proj
    else:
        out = F.rms_norm(out, out.shape[-1:], layer.norm.weight, layer.layer_norm_epsilon)
        last = layer.out_proj
    return last((out * gate).flatten(2)), State(conv_state, recurrent_state)


def delta_rule(
    qkv: tuple[Tensor, Tensor, Tensor], g: Tensor, beta: Tensor, s: Tensor
) -> tuple[Tensor, Tensor]:
    """Chunked gated delta rule.

    Args:
        qkv: q and k `[B, H, T, K]`, k of unit length, q scaled; v `[B, HV, T, V]`.
        g: Log decay `[B, HV, T]`, at most 0.
        beta: Write strength `[B, HV, T]`.
        s: State before the first token `[B, HV, K, V]`.

    Returns:
        Output `[B, HV, T, V]` and the state after the last token.

    Source: Gated Delta Networks (Yang et al. 2024), section 3.3, the WY form.
    """
    length = g.shape[-1]
    pad = -length % CHUNK
    q, k, v = (F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for x in qkv)
    g, beta = (F.pad(x, (0, pad)).unflatten(2, (-1, CHUNK)) for x in (g, beta))
    repeat = v.shape[1] // k.shape[1]
    total = g.cumsum(-1)
    ones = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device)
    pairs = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(ones.triu(1), -torch.inf).exp()
    kk = (k @ k.transpose(-1, -2)).repeat_interleave(repeat, 1)
    qk = (q @ k.transpose(-1, -2)).repeat_interleave(repeat, 1) * pairs
    q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
    system = kk * pairs * beta.unsqueeze(-1)
    grow = total.exp().unsqueeze(-1)
    right = torch.cat((v, k * grow), -1) * beta.unsqueeze(-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k.shape[-1]), -1)
    q = q * grow
    k = (k * (total[..., -1:] - total).exp().unsqueeze(-1)).transpose(-1, -2)
    carry = total[..., -1].exp()[..., None, None]
    outs = []
    chunks = (x.unbind(2) for x in (q, k, qk, u, w, carry))
    for q_i, k_i, qk_i, u_i, w_i, carry_i in zip(*chunks, strict=True):
        fresh = u_i - w_i @ s
        outs.append(q_i @ s + qk_i @ fresh)
        s = s * carry_i + k_i @ fresh
    return torch.cat(outs, 2)[:, :, :length], s


def _gdn_in_parts(layer: nn.Module, x: Tensor, memory: Memory) -> Tensor:
    if memory.cut is None:
        return gdn(layer, x, None, memory.speedup)[0]
    parts = (x[:, : memory.cut], x[:, memory.cut :])
    return torch.cat([gdn(layer, part, None, memory.speedup)[0] for part in parts], 1)


def _gdn_inputs(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k and v in one, the output's gate, the decay's input, and beta, each `[B, T, .]`."""
    if hasattr(layer, "in_proj_qkv"):
        beta = layer.in_proj_b(x).sigmoid()
        return layer.in_proj_qkv(x), layer.in_proj_z(x), layer.in_proj_a(x), beta
    qkv = torch.cat((layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)), -1)
    beta = layer.b_proj(x).sigmoid() * (2 if layer.allow_neg_eigval else 1)
    return qkv, layer.g_proj(x), layer.a_proj(x), beta


def _queries(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Queries and keys `[B, T, H, K]`, normed, and the output's gate.

    Qwen3.5 norms each head and has a gate, OLMo-Hybrid norms all heads together and has none.
    """
    heads = (-1, layer.head_dim)
    if layer.q_norm.weight.numel() == layer.q_proj.out_features:
        q, k = norm(layer.q_norm, layer.q_proj(x)), norm(layer.k_norm, layer.k_proj(x))
        return q.unflatten(-1, heads), k.unflatten(-1, heads), None
    q, gate = layer.q_proj(x).unflatten(-1, (-1, 2 * layer.head_dim)).chunk(2, dim=-1)
    return norm(layer.q_norm, q), norm(layer.k_norm, layer.k_proj(x).unflatten(-1, heads)), gate


def _normed(block: nn.Module, x: Tensor) -> Tensor:
    """What a layer's sublayer reads; OLMo-Hybrid's FA reads it as it is."""
    return norm(block.input_layernorm, x) if hasattr(block, "input_layernorm") else x


def _added(block: nn.Module, x: Tensor, out: Tensor) -> Tensor:
    """A layer's output: what its sublayer and its MLP add to `x`, in OLMo-Hybrid's FA normed."""
    if hasattr(block, "post_feedforward_layernorm"):
        x = x + norm(block.post_attention_layernorm, out)
        return x + norm(block.post_feedforward_layernorm, _mlp(block, x))
    x = x + out
    return x + _mlp(block, norm(block.post_attention_layernorm, x))


def _mlp(block: nn.Module, y: Tensor) -> Tensor:
    return block.mlp.down_proj(F.silu(block.mlp.gate_proj(y)) * block.mlp.up_proj(y))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _rotate(x: Tensor, rope: Rope | None) -> Tensor:
    if rope is None:
        return x
    cos, sin = rope
    turned, kept = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-b, a), -1) * sin, kept), -1)
