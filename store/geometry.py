"""The shape of a stored object's payload, engine-neutral.

Every payload is an array of units x rows: `kv` has a unit per (layer, kv head) and a row per token,
`hidden` a unit per replay source and a row per token, `checkpoint` a unit per (linear layer, key
head) and a single row. Head shards and any row range are therefore plain byte ranges.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from functools import cached_property

from tailreplay.store.objects import Kind

MAX_PAGE_BYTES = 1 << 20
"""Largest page, in bytes; a page never holds more rows than PAGE_TOKENS."""


class Dtype(enum.IntEnum):
    """Element types. The numbers are part of the stored format."""

    NONE = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return {Dtype.NONE: 0, Dtype.FLOAT32: 4}.get(self, 2)


class StateLayout(enum.IntEnum):
    """Axis order of a recurrent state. The numbers are part of the stored format."""

    NONE = 0
    K_FIRST = 1
    """`[K, V]`, as Transformers keeps it."""
    V_FIRST = 2
    """`[V, K]`, as vLLM's GPU kernels keep it."""


@dataclass(frozen=True)
class Geometry:
    """What a payload of one kind looks like.

    Attributes:
        kind: kind of object.
        dtype: of keys, values, hiddens and conv rows.
        shape: six numbers, zero where unused.
            kv: (FA layers, kv heads, head dim), a row = K then V of one token.
            hidden: (sources, hidden size).
            checkpoint: (linear layers, key heads, value heads per key head, key dim, value dim,
            conv rows). A unit = the conv rows of the group's q, k and v channels
            `[2 * key dim + value heads * value dim, conv rows]`, then its recurrent states
            `[value heads, key dim, value dim]`.
        state_dtype: of recurrent states; NONE for other kinds.
        state_layout: axis order of recurrent states; NONE for other kinds.
    """

    kind: Kind
    dtype: Dtype
    shape: tuple[int, int, int, int, int, int]
    state_dtype: Dtype = Dtype.NONE
    state_layout: StateLayout = StateLayout.NONE

    @cached_property
    def units(self) -> int:
        """Units in a payload."""
        return self.shape[0] if self.kind is Kind.HIDDEN else self.shape[0] * self.shape[1]

    @property
    def conv_bytes(self) -> int:
        """Bytes of the conv rows in a checkpoint's unit."""
        _, _, heads, key_dim, value_dim, conv_rows = self.shape
        return (2 * key_dim + heads * value_dim) * conv_rows * self.dtype.itemsize

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row of one unit."""
        if self.kind is Kind.KV:
            return 2 * self.shape[2] * self.dtype.itemsize
        if self.kind is Kind.HIDDEN:
            return self.shape[1] * self.dtype.itemsize
        return self.conv_bytes + math.prod(self.shape[2:5]) * self.state_dtype.itemsize

    def payload_bytes(self, rows: int) -> int:
        """Bytes of a payload with `rows` rows."""
        return self.units * rows * self.row_bytes


def kv_geometry(*, fa_layers: int, kv_heads: int, head_dim: int, dtype: Dtype) -> Geometry:
    """Geometry of `kv` objects."""
    return Geometry(Kind.KV, dtype, (fa_layers, kv_heads, head_dim, 0, 0, 0))


def hidden_geometry(*, sources: int, hidden_size: int, dtype: Dtype) -> Geometry:
    """Geometry of `hidden` objects."""
    return Geometry(Kind.HIDDEN, dtype, (sources, hidden_size, 0, 0, 0, 0))


def checkpoint_geometry(
    *, shape: tuple[int, int, int, int, int, int], dtype: Dtype, state_dtype: Dtype
) -> Geometry:
    """Geometry of `checkpoint` objects with K-first states; `shape` as in Geometry."""
    return Geometry(Kind.CHECKPOINT, dtype, shape, state_dtype, StateLayout.K_FIRST)
