"""A request's LoRA adapter, for the tokens of a gap.

vLLM tells its layers before each forward which adapter every token has. A gap runs beside that
forward, so it says the same for its own tokens, and afterwards what vLLM had said: logits are
computed after it.
"""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Adapters:
    """A worker's adapters. Used on the worker's main thread only.

    Args:
        manager: vLLM's WorkerLoRAManager; what it is told is noted from now on.
        mapping_class: vLLM's LoRAMapping.
    """

    def __init__(self, manager: Any, mapping_class: Callable[..., Any]) -> None:
        self._mapping_class = mapping_class
        self._set = manager.set_active_adapters
        manager.set_active_adapters = self._for_step
        self._step: tuple[Any, Any] | None = None
        self._changed = False

    def use(self, adapter: Any, tokens: int) -> None:
        """The next forward has `tokens` tokens, all with this adapter (a LoRARequest, or None)."""
        number = 0 if adapter is None else adapter.lora_int_id
        mapping = self._mapping_class((number,) * tokens, (number,), is_prefill=True)
        self._changed = True
        self._set(set() if adapter is None else {adapter}, mapping)

    def restore(self) -> None:
        """Says again what vLLM has said for this step, if anything else was said since."""
        if self._changed and self._step is not None:
            self._set(*self._step)
        self._changed = False

    def _for_step(self, adapters: Any, mapping: Any) -> None:
        self._step = adapters, mapping
        self._set(adapters, mapping)
