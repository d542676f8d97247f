"""Between an engine's tensors and stored payloads: geometry, packing, unpacking.

Payload axes are those of `tailreplay.store.geometry`: units x rows x row bytes.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tailreplay.replay.linear_state import LinearState
from tailreplay.store.geometry import (
    Dtype,
    Geometry,
    checkpoint_geometry,
    hidden_geometry,
    kv_geometry,
)
from tailreplay.store.objects import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from tailreplay.connector.model_dims import ModelDims

    Bytes3 = npt.NDArray[np.uint8]

_DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.float16: Dtype.FLOAT16,
}


class PayloadCodec:
    """Packs and unpacks one model's objects.

    Args:
        dims: of the model, or of one rank's share of it.

    Attributes:
        geometry: of each kind.

    Raises:
        ValueError: the model's dtype can not be stored.
    """

    def __init__(self, dims: ModelDims) -> None:
        if dims.dtype not in _DTYPES:
            raise ValueError(f"model dtype is {dims.dtype}, wanted one of {list(_DTYPES)}")
        self._dims = dims
        self._heads_per_key = dims.value_heads // dims.key_heads
        dtype = _DTYPES[dims.dtype]
        self.geometry: dict[Kind, Geometry] = {
            Kind.KV: kv_geometry(
                fa_layers=len(dims.fa_layers),
                kv_heads=dims.kv_heads,
                head_dim=dims.kv_head_dim,
                dtype=dtype,
            ),
            Kind.HIDDEN: hidden_geometry(
                sources=len(dims.hidden_sources), hidden_size=dims.hidden_size, dtype=dtype
            ),
            Kind.CHECKPOINT: checkpoint_geometry(
                shape=(
                    len(dims.linear_layers),
                    dims.key_heads,
                    self._heads_per_key,
                    dims.key_dim,
                    dims.value_dim,
                    dims.conv_width,
                ),
                dtype=dtype,
                state_dtype=Dtype.FLOAT32,
            ),
        }

    def kv_rows(self, layers: Sequence[tuple[Tensor, Tensor]], first: int, end: int) -> Tensor:
        """Rows [first, end) of every FA layer's keys and values, each `[H, T, d]`.

        Returns:
            `[units, rows, row bytes]` uint8 on the device, in memory of its own.
        """
        rows = [torch.stack((k[:, first:end], v[:, first:end]), dim=2) for k, v in layers]
        return _as_bytes(torch.stack(rows).flatten(0, 1).flatten(2))

    def hidden_rows(self, sources: Sequence[Tensor], first: int, end: int) -> Tensor:
        """Rows [first, end) of every source's hiddens, each `[T, D]`; returns as `kv_rows`."""
        return _as_bytes(torch.stack([rows[first:end] for rows in sources]))

    def checkpoint_rows(self, states: Mapping[int, LinearState]) -> Tensor:
        """The states of all linear layers, one row each; returns as `kv_rows`."""
        return torch.cat([self._split(states[layer]) for layer in self._dims.linear_layers])[
            :, None
        ]

    def pack_kv(self, layers: Sequence[tuple[Tensor, Tensor]], first: int, end: int) -> memoryview:
        """Payload of `kv_rows`."""
        return _payload(self.kv_rows(layers, first, end))

    def pack_hidden(self, sources: Sequence[Tensor], first: int, end: int) -> memoryview:
        """Payload of `hidden_rows`."""
        return _payload(self.hidden_rows(sources, first, end))

    def hidden_parts(self, sources: Sequence[Tensor], first: int, end: int) -> list[memoryview]:
        """As `pack_hidden`, source by source; what lies in the host's memory is not copied."""
        if self._dims.device.type != "cpu":
            return [self.pack_hidden(sources, first, end)]
        return [_payload(_as_bytes(rows[first:end])) for rows in sources]

    def pack_checkpoint(self, states: Mapping[int, LinearState]) -> memoryview:
        """Payload of `checkpoint_rows`."""
        return _payload(self.checkpoint_rows(states))

    def unpack_kv(self, rows: Bytes3 | Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, T, d]` of one layer, as views of `rows` `[H, T, row bytes]`."""
        tensor = _tensor(rows).view(self._dims.dtype)
        both = tensor.view(*rows.shape[:2], 2, self._dims.kv_head_dim)
        return both[:, :, 0], both[:, :, 1]

    def unpack_hidden(self, rows: Bytes3 | Tensor) -> Tensor:
        """Hiddens `[T, D]` of one source, as a view of `rows` `[1, T, row bytes]`."""
        return _tensor(rows).view(self._dims.dtype)[0]

    def unpack_checkpoint(self, units: Bytes3 | Tensor) -> dict[int, LinearState]:
        """States of all linear layers from `units` `[layers * key heads, 1, row bytes]`."""
        layers = self._dims.linear_layers
        per_layer = _tensor(units).reshape(len(layers), self._dims.key_heads, -1)
        return {layer: self._join(per_layer[i]) for i, layer in enumerate(layers)}

    def _split(self, state: LinearState) -> Tensor:
        """Bytes per key head, `[key heads, bytes]`: conv rows, then recurrent states."""
        conv = torch.cat(self._conv_parts(state.conv), dim=1)
        recurrent = state.recurrent.reshape(self._dims.key_heads, -1)
        return torch.cat((_as_bytes(conv.flatten(1)), _as_bytes(recurrent)), dim=1)

    def _join(self, units: Tensor) -> LinearState:
        dims, cut = self._dims, self.geometry[Kind.CHECKPOINT].conv_bytes
        conv = units[:, :cut].contiguous().view(dims.dtype)
        conv = conv.view(dims.key_heads, -1, dims.conv_width)
        cuts = (0, dims.key_dim, 2 * dims.key_dim, conv.shape[1])
        parts = [conv[:, start:end] for start, end in itertools.pairwise(cuts)]
        recurrent = units[:, cut:].contiguous().view(torch.float32)
        return LinearState(
            torch.cat([part.flatten(0, 1) for part in parts]).to(dims.device),
            recurrent.view(dims.recurrent_shape).to(dims.device),
        )

    def _conv_parts(self, conv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Conv rows of q, k and v, each split by key head: `[key heads, channels, width]`."""
        keys = self._dims.key_heads * self._dims.key_dim
        q, k, v = conv[:keys], conv[keys : 2 * keys], conv[2 * keys :]
        shape = (self._dims.key_heads, -1, conv.shape[1])
        return q.reshape(shape), k.reshape(shape), v.reshape(shape)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's last axis."""
    return tensor.detach().contiguous().view(torch.uint8)


def _tensor(rows: Bytes3 | Tensor) -> Tensor:
    return rows if isinstance(rows, Tensor) else torch.from_numpy(rows)


def _payload(rows: Tensor) -> memoryview:
    array: npt.NDArray[np.uint8] = rows.cpu().flatten().numpy()
    return array.data
