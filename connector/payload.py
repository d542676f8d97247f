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

    from tailreplay.connector.hf_model import HybridModel
    from tailreplay.connector.vllm_model import ModelDims

    Bytes3 = npt.NDArray[np.uint8]

_DTYPES = {
    torch.float32: Dtype.FLOAT32,
    torch.bfloat16: Dtype.BFLOAT16,
    torch.float16: Dtype.FLOAT16,
}


class PayloadCodec:
    """Packs and unpacks one model's objects.

    Args:
        model: gives shapes, dtype and layer order.

    Attributes:
        geometry: of each kind.

    Raises:
        ValueError: the model's dtype can not be stored.
    """

    def __init__(self, model: HybridModel | ModelDims) -> None:
        if model.dtype not in _DTYPES:
            raise ValueError(f"model dtype is {model.dtype}, wanted one of {list(_DTYPES)}")
        self._model = model
        self._heads_per_key = model.value_heads // model.key_heads
        dtype = _DTYPES[model.dtype]
        self.geometry: dict[Kind, Geometry] = {
            Kind.KV: kv_geometry(
                fa_layers=len(model.fa_layers),
                kv_heads=model.kv_heads,
                head_dim=model.kv_head_dim,
                dtype=dtype,
            ),
            Kind.HIDDEN: hidden_geometry(
                sources=len(model.hidden_sources), hidden_size=model.hidden_size, dtype=dtype
            ),
            Kind.CHECKPOINT: checkpoint_geometry(
                shape=(
                    len(model.linear_layers),
                    model.key_heads,
                    self._heads_per_key,
                    model.key_dim,
                    model.value_dim,
                    model.conv_width,
                ),
                dtype=dtype,
                state_dtype=Dtype.FLOAT32,
            ),
        }

    def pack_kv(self, layers: Sequence[tuple[Tensor, Tensor]], first: int, end: int) -> memoryview:
        """Payload of rows [first, end) of every FA layer's keys and values, each `[H, T, d]`."""
        rows = [torch.stack((k[:, first:end], v[:, first:end]), dim=2) for k, v in layers]
        return _bytes(torch.stack(rows))

    def pack_hidden(self, sources: Sequence[Tensor], first: int, end: int) -> memoryview:
        """Payload of rows [first, end) of every source's hiddens, each `[T, D]`."""
        return _bytes(torch.stack([rows[first:end] for rows in sources]))

    def pack_checkpoint(self, states: Mapping[int, LinearState]) -> memoryview:
        """Payload of the states of all linear layers."""
        units = [part for layer in self._model.linear_layers for part in self._split(states[layer])]
        return np.concatenate(units).data

    def unpack_kv(self, rows: Bytes3) -> tuple[Tensor, Tensor]:
        """Keys and values `[H, T, d]` of one layer, as views of `rows` `[H, T, row bytes]`."""
        tensor = torch.from_numpy(rows).view(self._model.dtype)
        both = tensor.view(*rows.shape[:2], 2, self._model.kv_head_dim)
        return both[:, :, 0], both[:, :, 1]

    def unpack_hidden(self, rows: Bytes3) -> Tensor:
        """Hiddens `[T, D]` of one source, as a view of `rows` `[1, T, row bytes]`."""
        return torch.from_numpy(rows).view(self._model.dtype)[0]

    def unpack_checkpoint(self, units: Bytes3) -> dict[int, LinearState]:
        """States of all linear layers from `units` `[layers * key heads, 1, row bytes]`."""
        per_layer = units.reshape(len(self._model.linear_layers), self._model.key_heads, -1)
        return {
            layer: self._join(per_layer[i]) for i, layer in enumerate(self._model.linear_layers)
        }

    def _split(self, state: LinearState) -> list[npt.NDArray[np.uint8]]:
        """One unit's bytes per key head: its conv rows, then its recurrent states."""
        recurrent = state.recurrent.view(
            self._model.key_heads, self._heads_per_key, *state.recurrent.shape[1:]
        )
        q, k, v = self._conv_parts(state.conv)
        return [
            np.concatenate([_array(torch.cat((q[g], k[g], v[g]))), _array(recurrent[g])])
            for g in range(self._model.key_heads)
        ]

    def _join(self, units: npt.NDArray[np.uint8]) -> LinearState:
        model, cut = self._model, self.geometry[Kind.CHECKPOINT].conv_bytes
        conv = torch.from_numpy(np.ascontiguousarray(units[:, :cut])).view(model.dtype)
        conv = conv.view(model.key_heads, -1, model.conv_width)
        cuts = (0, model.key_dim, 2 * model.key_dim, conv.shape[1])
        parts = [conv[:, start:end] for start, end in itertools.pairwise(cuts)]
        recurrent = torch.from_numpy(np.ascontiguousarray(units[:, cut:])).view(torch.float32)
        shape = (model.value_heads, model.key_dim, model.value_dim)
        return LinearState(
            torch.cat([part.flatten(0, 1) for part in parts]).to(model.device),
            recurrent.view(shape).to(model.device),
        )

    def _conv_parts(self, conv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Conv rows of q, k and v, each split by key head: `[key heads, channels, width]`."""
        keys = self._model.key_heads * self._model.key_dim
        q, k, v = conv[:keys], conv[keys : 2 * keys], conv[2 * keys :]
        shape = (self._model.key_heads, -1, conv.shape[1])
        return q.reshape(shape), k.reshape(shape), v.reshape(shape)


def _array(tensor: Tensor) -> npt.NDArray[np.uint8]:
    """A tensor's bytes, flat."""
    flat = tensor.detach().cpu().contiguous().flatten()
    array: npt.NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return array


def _bytes(tensor: Tensor) -> memoryview:
    return _array(tensor).data
