"""What the Transformers engine does after an answer: stores the prompt, repairs a tail's end."""

from __future__ import annotations

import logging
import secrets
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tailreplay.connector.hf_keep import keep_on_device
from tailreplay.connector.hf_outgoing import Outgoing
from tailreplay.connector.hf_run import PromptRun
from tailreplay.connector.load import LoadFailed
from tailreplay.connector.plan import plan_repair
from tailreplay.connector.report import Report
from tailreplay.store.errors import StoreUnavailable, TailReplayError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from tailreplay.connector.calibration import Calibration
    from tailreplay.connector.client import StoreClient
    from tailreplay.connector.device_pool import DevicePool
    from tailreplay.connector.fetch_plan import FetchPlan, ModelShape
    from tailreplay.connector.hf_loads import Loads
    from tailreplay.connector.hf_model import HybridModel
    from tailreplay.connector.hf_request import Outcome, Request
    from tailreplay.connector.payload import PayloadCodec
    from tailreplay.connector.put_frames import ObjectBytes
    from tailreplay.replay.linear_state import LinearState

logger = logging.getLogger(__name__)

_MAX_BACKLOG = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a write-back works with.

    Attributes:
        client: puts objects.
        tenant: digest of whose they are.
        model: what has run.
        codec: packs what it has computed.
        shape: of the model, for plans.
        loads: what a repair starts from.
        device_pool: the GPU tier; None = there is none.
        calibration: is told how wrong tails were.
    """

    client: StoreClient
    tenant: bytes
    model: HybridModel
    codec: PayloadCodec
    shape: ModelShape
    loads: Loads
    device_pool: DevicePool | None
    calibration: Calibration


class WriteBack:
    """One thread for what no answer waits for. All calls but `close` under the engine's lock.

    Args:
        parts: what to work with.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tailreplay-put")
        # Guarded by the engine's lock: what has not ended.
        self._under_way: set[Future[None]] = set()

    def pending(self) -> set[Future[None]]:
        """What has not ended yet."""
        self._under_way = {work for work in self._under_way if not work.done()}
        return set(self._under_way)

    def put(self, run: PromptRun, outcome: Outcome, request: Request) -> None:
        """Stores a prompt before long; only exact numbers are stored."""
        if not outcome.plan.exact:
            request.report.event("not_stored:provenance")
        elif len(self.pending()) >= _MAX_BACKLOG:
            request.report.event("not_stored:write_backlog")
        else:
            self._submit(self._put, run, outcome, request)

    def repair(self, outcome: Outcome, request: Request) -> None:
        """Repairs an approximate hit, if there is nothing better to do."""
        plan = plan_repair(outcome.stored, outcome.plan.used_tokens, self._parts.shape)
        if plan is not None and not self.pending():
            own = replace(request, report=Report(secrets.token_hex(8), len(request.tokens)))
            self._submit(self._repair, plan, outcome, own)

    def close(self) -> None:
        """Lets what is under way end; nothing may be asked for afterwards."""
        self._worker.shutdown(wait=True)

    def _submit(self, work: Callable[..., None], *what: object) -> None:
        future = self._worker.submit(work, *what)
        future.add_done_callback(_log_crash)
        self._under_way.add(future)

    def _put(self, run: PromptRun, outcome: Outcome, request: Request) -> None:
        """Stores what the store lacks of a prompt; a failure is logged and nothing else."""
        done, load, parts = outcome.done, outcome.load, self._parts
        try:
            if load is not None:
                done = run.hidden_with_loaded(done, outcome.plan, load)
        except LoadFailed as failure:
            logger.debug("a page stays unstored: %s", failure)
        if parts.device_pool is not None:
            keep_on_device(parts.device_pool, parts.codec, request.chain, done)
        objects = self._outgoing(request).missing(done, outcome.stored, len(request.tokens))
        try:
            self._send(request, len(request.tokens), objects)
        except StoreUnavailable as error:
            logger.debug("a prompt was not stored: %s", error)
        except TailReplayError as error:
            logger.warning("the store refused a prompt: %s", error)

    def _repair(self, plan: FetchPlan, outcome: Outcome, request: Request) -> None:
        """Rebuilds the state at a tail's boundary exactly, stores it, and notes the tail's error.

        The next request there starts from it; a failure is logged and nothing else.
        """
        parts, m = self._parts, plan.used_tokens
        ids = torch.as_tensor(request.tokens.astype("int64"), device=parts.model.dims.device)
        step = request.policy.prefill_chunk_tokens
        run = PromptRun(parts.model, parts.codec, ids, step, request.report)
        load = parts.loads.of(plan, request)
        try:
            parts.loads.start(load, outcome.stored, request)
            states = run.rebuild(plan, load, outcome.done.kv)
            self._send(request, m, [self._outgoing(request).checkpoint(states, m)])
        except (LoadFailed, TailReplayError) as failure:
            load.cancel()
            logger.debug("a state was not repaired: %s", failure)
            return
        error = _largest_error(outcome.done.approximate or states, states)
        logger.debug("a tail that ends at token %d was off by %.3g", m, error)
        if outcome.plan.budget is not None:
            parts.calibration.observe(outcome.plan.budget, error)

    def _send(self, request: Request, tokens: int, objects: Iterable[ObjectBytes]) -> None:
        self._parts.client.put(
            request.chain.namespace,
            request.tokens[:tokens],
            objects,
            timeout_s=request.policy.put_timeout_s,
            tenant=self._parts.tenant,
        )

    def _outgoing(self, request: Request) -> Outgoing:
        chain = request.chain
        return Outgoing(chain.namespace, chain, self._parts.model, self._parts.codec)


def _largest_error(got: dict[int, LinearState], wanted: dict[int, LinearState]) -> float:
    """Relative error of the layer whose recurrent state is off most."""
    pairs = [(got[layer].recurrent, state.recurrent) for layer, state in wanted.items()]
    return max(float((a - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def _log_crash(work: Future[None]) -> None:
    """Says what ended a write-back that nobody foresaw; nobody asks for its result."""
    if not work.cancelled() and (error := work.exception()) is not None:
        logger.error("a prompt was not stored", exc_info=error)
