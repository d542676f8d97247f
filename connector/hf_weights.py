"""What identifies the weights of a Transformers model."""

from __future__ import annotations

import logging
import secrets
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from tailreplay.connector.identity import MAX_DIGESTED_BYTES

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


def weights_id(model: torch.nn.Module) -> str:
    """Digest of the weights, or random where they are larger than MAX_DIGESTED_BYTES."""
    state = model.state_dict()
    if sum(t.numel() * t.element_size() for t in state.values()) > MAX_DIGESTED_BYTES:
        logger.warning(
            "weights are larger than %d bytes and have no identity: nothing is shared with other "
            "processes; pass weights_id, the same for all engines that run these weights",
            MAX_DIGESTED_BYTES,
        )
        return f"random:{secrets.token_hex(16)}"
    hasher = blake3()
    for name, tensor in sorted(state.items()):
        data = _bytes_of(tensor)
        hasher.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)}:{len(data)};".encode())
        hasher.update(data)
    return f"blake3:{hasher.hexdigest()}"


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
