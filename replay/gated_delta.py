"""The gated delta rule: a token loop as the truth, and a chunked scan for the state alone.

Letters as in flash-linear-attention, without the batch: T tokens, H key heads, HV value heads,
K and V their dims. With HV > H (grouped values) value head i reads key head i // (HV / H).
A recurrent state is K-first, `[HV, K, V]`. The decay g is in log space, finite and <= 0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 32
"""Tokens a chunk of `state_scan`: long enough to batch the work, short enough for fp32."""


def l2norm(x: Tensor) -> Tensor:
    """Scale the last dim of `x` to length 1, with the epsilon (1e-6) trained models expect.

    Source: Gated DeltaNet, arXiv 2412.06464, section 3.4 (L2 norm on q and k).
    """
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply the rule token by token, in the inputs' dtype; the truth for the fast paths.

    Args:
        q: `[T, H, K]`, normalised; scaled here by K ** -0.5.
        k: `[T, H, K]`, normalised.
        v: `[T, HV, V]`.
        g: `[T, HV]`.
        beta: `[T, HV]`, in [0, 2].
        initial_state: `[HV, K, V]`; None = zeros. Not changed.

    Returns:
        Outputs `[T, HV, V]` and the final state `[HV, K, V]`.

    Source: arXiv 2412.06464, equation 10:
        S_t = alpha_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T, o_t = S_t^T q_t.
    """
    share = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(share, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    state = v.new_zeros(*k.shape[1:], v.shape[2]) if initial_state is None else initial_state
    outputs = torch.empty_like(v)
    for t in range(v.shape[0]):
        state = state * g[t].exp()[:, None, None]
        read = torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - read))
        outputs[t] = torch.einsum("hk,hkv->hv", q[t], state)
    return outputs, state


def state_scan(
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Tensor:
    """Compute the state after the last token, in fp32 and without any output.

    Inside a chunk the rule is a triangular system, solved for all chunks at once; only the state
    goes from chunk to chunk. The tokens are padded in front: k = beta = g = 0 changes nothing.

    Args:
        k: `[T, H, K]`, T >= 1, normalised.
        v: `[T, HV, V]`.
        g: `[T, HV]`.
        beta: `[T, HV]`, in [0, 2].
        initial_state: `[HV, K, V]`; None = zeros. Not changed.
        chunk_tokens: tokens a chunk, 1 to 64; changes rounding and speed only. (Longer chunks
            lose precision, in differences of large running sums.)

    Returns:
        `[HV, K, V]` fp32, memory of its own.

    Source: arXiv 2412.06464, section 3.3 (WY form with decay). With c the running sum of g inside
        a chunk and A_ij = beta_i exp(c_i - c_j) k_i.k_j for j < i, else 0:
        U = (I + A)^-1 (beta v), W = (I + A)^-1 (beta exp(c) k),
        S' = exp(c_last) S + sum_i exp(c_last - c_i) k_i (U - W S)_i^T.
    """
    heads, value_dim, key_dim = k.shape[1], v.shape[2], k.shape[2]
    k, v, g, beta = (_chunks(x, heads, chunk_tokens) for x in (k, v, g[..., None], beta[..., None]))
    decay = g.cumsum(-2)
    # Above the diagonal the exponent is clamped and the result never read by the solver.
    pairs = (decay - decay.mT).clamp(max=0).exp()
    system = beta * pairs * (k @ k.mT)
    wanted = torch.cat([beta * v, beta * decay.exp() * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    u, w = solved.split([value_dim, key_dim], dim=-1)
    last = decay[..., -1:, :]
    writes = ((last - decay).exp() * k).mT
    state = _grouped_state(initial_state, v, key_dim)
    for n in range(v.shape[2]):
        fresh = u[:, :, n] - w[:, :, n] @ state
        state = last[:, :, n].exp() * state + writes[:, :, n] @ fresh
    return state.flatten(0, 1)


def _chunks(x: Tensor, heads: int, chunk_tokens: int) -> Tensor:
    """Turn `[T, heads * R, F]` into fp32 `[heads, R, N, chunk_tokens, F]`, zeros in front."""
    pad = -x.shape[0] % chunk_tokens
    padded = F.pad(x.float().transpose(0, 1), (0, 0, pad, 0))
    return padded.reshape(heads, x.shape[1] // heads, -1, chunk_tokens, x.shape[2])


def _grouped_state(initial_state: Tensor | None, v: Tensor, key_dim: int) -> Tensor:
    """Return the start state as fp32 `[H, R, K, V]`, for v of `[H, R, N, C, V]`."""
    shape = (*v.shape[:2], key_dim, v.shape[-1])
    if initial_state is None:
        return v.new_zeros(shape)
    return initial_state.float().reshape(shape)
