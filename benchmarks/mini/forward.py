"""The model's forward pass in plain torch: what Transformers computes, states open.

Beyond Transformers it can cut the GDN memory at a token, weaken it everywhere (the warm-up of
training) and hand out or take in states, which the scores need. Tensor letters: B samples,
T tokens, D hidden size, H heads, K and V head dims, C chunk.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3_5ForCausalLM

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


def hidden_states(model: Qwen3_5ForCausalLM, ids: Tensor, memory: Memory = PLAIN) -> Tensor:
    """Final hidden states `[B, T, D]` of `ids` `[B, T]`, before the output matrix."""
    x = model.model.embed_tokens(ids)
    rope = rotary(model, 0, ids.shape[1])
    for block in model.model.layers:
        y = norm(block.input_layernorm, x)
        if block.block_type == "full_attention":
            if memory.attends:
                x = x + attention(block.self_attn, y, rope)[0]
        else:
            x = x + _gdn_in_parts(block.linear_attn, y, memory)
        x = x + _mlp(block, x)
    return norm(model.model.norm, x)


def extend(
    model: Qwen3_5ForCausalLM,
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
        y = norm(block.input_layernorm, x)
        if block.block_type == "full_attention":
            before = past.kv[i] if past else None
            out, new.kv[i] = attention(block.self_attn, y, rope, before, window=window)
        else:
            state = past.states.get(i) if past else None
            out, new.states[i] = gdn(block.linear_attn, y, state, speedup)
        x = x + out
        x = x + _mlp(block, x)
        if block.block_type == "full_attention":
            new.hidden[i] = x
    return norm(model.model.norm, x), new


def replay(
    model: Qwen3_5ForCausalLM, hidden: dict[int, Tensor], k: int, speedup: float | None = 1.0
) -> dict[int, State]:
    """GDN states rebuilt from the last `k` stored hidden rows of each replay group; k = 0: none."""
    states: dict[int, State] = {}
    if k == 0:
        return states
    for i, block in enumerate(model.model.layers):
        if block.block_type == "full_attention":
            continue
        if i - 1 in hidden:
            x = hidden[i - 1][:, -k:]
        out, states[i] = gdn(block.linear_attn, norm(block.input_layernorm, x), None, speedup)
        x = x + out
        x = x + _mlp(block, x)
    return states


def replay_tokens(
    model: Qwen3_5ForCausalLM, ids: Tensor, kv: dict[int, tuple[Tensor, Tensor]], k: int
) -> dict[int, State]:
    """GDN states rebuilt without hiddens: the last `k` of `ids` `[B, T]` run with the stored KV."""
    length = ids.shape[1]
    x = model.model.embed_tokens(ids[:, length - k :])
    rope = rotary(model, length - k, length)
    states: dict[int, State] = {}
    for i, block in enumerate(model.model.layers):
        y = norm(block.input_layernorm, x)
        if block.block_type == "full_attention":
            out, _ = attention(block.self_attn, y, rope, stored=kv[i])
        else:
            out, states[i] = gdn(block.linear_attn, y, None)
        x = x + out
        x = x + _mlp(block, x)
    return states


def rotary(model: Qwen3_5ForCausalLM, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines `[1, stop - start, rotary dims]` of text positions."""
    positions = torch.arange(start, stop, device=model.lm_head.weight.device).view(1, 1, -1)
    return model.model.rotary_emb(model.lm_head.weight, positions.expand(3, -1, -1))


def norm(module: nn.Module, x: Tensor) -> Tensor:
    """RMS norm whose weight is stored minus one."""
    return F.rms_norm(x, (x.shape[-1],), 1.0 + module.weight, module.eps)


def attention(
    layer: nn.Module,
    x: Tensor,
    rope: tuple[Tensor, Tensor],
    past: tuple[Tensor, Tensor] | None = None,
    stored: tuple[Tensor, Tensor] | None = None,
    window: int | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """FA sublayer on `x` `[B, T, D]`, normed; returns its output and all keys and values.

    `past` stands before x's own keys and values, `stored` instead of them too; `window` is how
    many tokens are seen from each, None = all.
    """
    dim = layer.head_dim
    q, gate = layer.q_proj(x).unflatten(-1, (-1, 2 * dim)).chunk(2, dim=-1)
    q = _rotate(norm(layer.q_norm, q).transpose(1, 2), rope)
    k = layer.k_proj(x).unflatten(-1, (-1, dim))
    k = _rotate(norm(layer.k_norm, k).transpose(1, 2), rope)
    v = layer.v_proj(x).unflatten(-1, (-1, dim)).transpose(1, 2)
    mask = None
    if stored is not None:
        k, v = stored
    elif past is not None:
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
    out = out.transpose(1, 2) * gate.sigmoid()
    return layer.o_proj(out.flatten(2)), (k, v)


def gdn(
    layer: nn.Module, x: Tensor, state: State | None, speedup: float | None = 1.0
) -> tuple[Tensor, State]:
    """GDN sublayer on `x` `[B, T, D]`, normed; returns its output and the state after it."""
    qkv = layer.in_proj_qkv(x).transpose(1, 2)
    width = layer.conv_kernel_size - 1
    qkv = F.pad(qkv, (width, 0)) if state is None else torch.cat((state.conv_state, qkv), 2)
    conv_state = qkv[:, :, -width:]
    qkv = F.silu(F.conv1d(qkv, layer.conv1d.weight, groups=qkv.shape[1]))
    q, k, v = qkv.transpose(1, 2).split((layer.key_dim, layer.key_dim, layer.value_dim), -1)
    q = _unit(q.unflatten(-1, (-1, layer.head_k_dim))).transpose(1, 2) * layer.head_k_dim**-0.5
    k = _unit(k.unflatten(-1, (-1, layer.head_k_dim))).transpose(1, 2)
    v = v.unflatten(-1, (-1, layer.head_v_dim)).transpose(1, 2)
    beta = layer.in_proj_b(x).sigmoid().transpose(1, 2)
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
        decay = layer.A_log.exp() * F.softplus(layer.in_proj_a(x) + layer.dt_bias)
        g = -speedup * decay.transpose(1, 2)
        out, recurrent_state = delta_rule((q, k, v), g, beta, recurrent_state)
    out = out.transpose(1, 2)
    z = layer.in_proj_z(x).unflatten(-1, (-1, layer.head_v_dim))
    out = F.rms_norm(out, out.shape[-1:], layer.norm.weight, layer.layer_norm_epsilon) * F.silu(z)
    return layer.out_proj(out.flatten(2)), State(conv_state, recurrent_state)


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


def _mlp(block: nn.Module, x: Tensor) -> Tensor:
    y = norm(block.post_attention_layernorm, x)
    return block.mlp.down_proj(F.silu(block.mlp.gate_proj(y)) * block.mlp.up_proj(y))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = rope
    turned, kept = x.split((cos.shape[-1], x.shape[-1] - cos.shape[-1]), -1)
    a, b = turned.chunk(2, -1)
    return torch.cat((turned * cos + torch.cat((-b, a), -1) * sin, kept), -1)
