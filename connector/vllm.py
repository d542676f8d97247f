"""The vLLM connector: name this module in `kv_connector_module_path`.

    --kv-transfer-config '{"kv_connector": "TailReplayConnector",
        "kv_connector_module_path": "tailreplay.connector.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "unix:///path/store.sock"}}'

vLLM makes one object in its scheduler and one in each worker; this class only hands the calls on.
"""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from tailreplay.connector.vllm_config import check_supported, is_tested
from tailreplay.connector.vllm_meta import StepOps, WorkerNews
from tailreplay.connector.vllm_metrics import TailReplayMetrics, TailReplayStats
from tailreplay.connector.vllm_scheduler import SchedulerSide
from tailreplay.connector.vllm_worker import WorkerSide

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["TailReplayConnector"]

logger = logging.getLogger(__name__)


def speak_through_vllm() -> None:
    """Has tailreplay's log lines come out where vLLM's do, unless somebody has set them up."""
    ours, theirs = logging.getLogger("tailreplay"), logging.getLogger("vllm")
    if not ours.handlers and not logging.getLogger().handlers and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False


class TailReplayConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc] # vLLM is untyped
    """Reuses prefixes at any token, through a tailreplay store.

    Raises:
        ValueError: the engine is configured in a way that is not supported.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._slot_mapping: Mapping[str, Tensor] | None = None
        speak_through_vllm()
        if not is_tested(vllm.__version__):
            logger.warning("vLLM %s is untested: nothing is cached", vllm.__version__)
            return
        check_supported(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerSide(vllm_config, kv_cache_config)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """As in vLLM's base class: by it the states that vLLM has cached itself are found."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._scheduler is not None:
            self._scheduler.bind(kv_cache_manager)

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost write is a later miss and nothing worse."""
        return False

    # The scheduler's side.

    def on_new_request(self, request: Any) -> None:
        """As in vLLM's base class."""
        if self._scheduler is not None:
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self,
        request: Any,
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """As in vLLM's base class; always an asynchronous load."""
        if self._scheduler is None:
            return 0, False
        return self._scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As in vLLM's base class."""
        if self._scheduler is not None:
            self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """As in vLLM's base class."""
        return StepOps() if self._scheduler is None else self._scheduler.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """As in vLLM's base class."""
        if self._scheduler is not None:
            self._scheduler.heard(
                connector_output.kv_connector_worker_meta,
                connector_output.finished_recving or set(),
                connector_output.failed_recving or set(),
            )

    def request_finished_all_groups(
        self,
        request: Any,
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """As in vLLM's base class; blocks are held for a step where the state in them is kept."""
        return (
            (False, None)
            if self._scheduler is None
            else self._scheduler.finished(request, block_ids)
        )

    def get_kv_connector_stats(self) -> TailReplayStats | None:
        """As in vLLM's base class; all counting is done in the scheduler."""
        return None if self._scheduler is None else TailReplayStats(self._scheduler.take_counts())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TailReplayStats:
        """As in vLLM's base class."""
        return TailReplayStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> TailReplayMetrics:
        """As in vLLM's base class."""
        return TailReplayMetrics(*args)

    # The worker's side.

    def register_kv_caches(self, kv_caches: Any) -> None:
        """As in vLLM's base class."""
        del kv_caches
        if not is_tested(vllm.__version__):
            return
        context = self._vllm_config.compilation_config.static_forward_context
        found = (getattr(layer, "tailreplay_capture", None) for layer in context.values())
        capture = next((c for c in found if c is not None), None)
        if capture is None:
            raise ValueError(
                "no capture on this model: it is no known hybrid, or the plugin "
                "'tailreplay' of vllm.general_plugins was not loaded (see VLLM_PLUGINS)"
            )
        self._worker = WorkerSide(self._vllm_config, self._kv_cache_config, capture)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """As in vLLM's base class."""
        del kwargs
        self._slot_mapping = forward_context.slot_mapping
        if self._worker is not None:
            self._worker.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: no load is part of a forward."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: rows are taken by the capture operators."""

    def wait_for_save(self) -> None:
        """As in vLLM's base class."""
        if self._worker is not None and self.has_connector_metadata():
            self._worker.keep(self._get_connector_metadata(), self._slot_mapping)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As in vLLM's base class; gaps are run here, when the step's own rows have been kept."""
        del finished_req_ids
        if self._worker is None:
            return KVConnectorTransferResults()
        self._worker.fill(self._get_connector_metadata())
        done, failed, released = self._worker.take_results()
        return KVConnectorTransferResults(
            finished_sending=released, finished_recving=done, failed_recving=failed
        )

    def build_connector_worker_meta(self) -> WorkerNews | None:
        """As in vLLM's base class."""
        return None if self._worker is None else self._worker.take_news()

    def shutdown(self) -> None:
        """Ends threads and connections."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()
