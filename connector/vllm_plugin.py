"""The `vllm.general_plugins` entry point: hangs capture on hybrid models before they are built.

vLLM calls `register` in every one of its processes. It changes nothing in an engine that is not
configured with our connector. The connector itself comes too late for this: it is made after the
model has been compiled.
"""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

import torch

from tailreplay.connector.vllm_config import is_ours, is_tested, settings_of
from tailreplay.replay.groups import FULL, replay_groups

logger = logging.getLogger(__name__)

_MODELS = (
    ("vllm.model_executor.models.qwen3_next", "Qwen3NextModel"),
    ("vllm.model_executor.models.qwen3_5", "Qwen3_5Model"),
    ("vllm.model_executor.models.olmo_hybrid", "OlmoHybridModel"),
)
_LAYERS = (
    ("vllm.model_executor.models.qwen3_next", "Qwen3NextDecoderLayer"),
    ("vllm.model_executor.models.olmo_hybrid", "OlmoHybridDecoderLayer"),
)
_ADAPTERS = (
    ("vllm.lora.worker_manager", "WorkerLoRAManager"),
    ("vllm.lora.worker_manager", "LRUCacheWorkerLoRAManager"),
)
_ATTENTION = ("vllm.model_executor.layers.attention.attention", "Attention")


def register() -> None:
    """Wraps what has to be wrapped; a second call does nothing."""
    import vllm

    if not is_tested(vllm.__version__):
        return
    for module, name in _MODELS:
        _wrap(module, name, "__init__", _with_capture)
    for module, name in _LAYERS:
        _wrap(module, name, "forward", _with_hidden)
    for module, name in _ADAPTERS:
        _wrap(module, name, "create_lora_manager", _with_adapters)
    _wrap(*_ATTENTION, "forward", _with_kv)


def _wrap(module: str, name: str, method: str, wrapper: Callable[[Any], Any]) -> None:
    try:
        owner = getattr(importlib.import_module(module), name)
    except ImportError as error:
        # A model that this build of vLLM can not import can not be served by it either.
        logger.debug("%s.%s is not wrapped: %s", module, name, error)
        return
    original = owner.__dict__.get(method)
    if original is not None and not hasattr(original, "tailreplay_wrapped"):
        wrapped: Any = functools.wraps(original)(wrapper(original))
        wrapped.tailreplay_wrapped = True
        setattr(owner, method, wrapped)


def _with_capture(original: Any) -> Any:
    def init(self: Any, *args: Any, vllm_config: Any, **kwargs: Any) -> None:
        original(self, *args, vllm_config=vllm_config, **kwargs)
        if is_ours(vllm_config) and not hasattr(self, "tailreplay_captured"):
            self.tailreplay_captured = True
            _attach(self, vllm_config)

    return init


def _with_hidden(original: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        buffer = getattr(self, "tailreplay_hidden", None)
        if buffer is not None:
            if isinstance(out, tuple):
                torch.ops.tailreplay.capture_sum(out[0], out[1], buffer)
            else:
                torch.ops.tailreplay.capture_copy(out, buffer)
        return out

    return forward


def _with_kv(original: Any) -> Any:
    def forward(self: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        keys = getattr(self, "tailreplay_keys", None)
        if keys is not None:
            self.tailreplay_take(key, value, keys, self.tailreplay_values)
        return original(self, query, key, value, *args, **kwargs)

    return forward


def _with_adapters(original: Any) -> Any:
    def create(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.lora.layers import LoRAMapping

        from tailreplay.connector.vllm_lora import Adapters

        changed = original(self, model, *args, **kwargs)
        for module in model.modules():
            if hasattr(module, "tailreplay_captured"):
                module.tailreplay_adapters = Adapters(self, LoRAMapping)
        return changed

    return create


def _attach(model: Any, vllm_config: Any) -> None:
    """Gives a freshly built inner model its buffers."""
    from tailreplay.connector.vllm_capture import Capture

    settings = settings_of(vllm_config)
    kinds = model.config.layer_types
    groups = replay_groups(kinds)
    sources = tuple(g.source for g in groups if g.source is not None)
    rows = max(
        vllm_config.scheduler_config.max_num_batched_tokens,
        vllm_config.compilation_config.max_cudagraph_capture_size or 0,
    )
    if settings.device_pool_bytes:
        # With the model, so that vLLM counts it before it hands out the rest of the device.
        memory = torch.empty(settings.device_pool_bytes, dtype=torch.uint8)
        model.register_buffer("tailreplay_pool", memory, persistent=False)
    Capture(
        model,
        tuple(i for i, kind in enumerate(kinds) if kind == FULL),
        sources if settings.keeps_hiddens else (),
        rows + _PADDING_ROWS,
        vllm_config.model_config.dtype,
    )


_PADDING_ROWS = 8
"""Rows by which a padded batch may be longer than the scheduler's budget."""
