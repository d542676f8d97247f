"""The Transformers engine: prefix reuse for a hybrid model, at any token."""

from __future__ import annotations

import logging
import secrets
import threading
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

try:
    import torch
    import transformers  # noqa: F401 - for hf_model
except ModuleNotFoundError as error:
    raise ImportError(
        f"tailreplay.connector.hf needs torch and transformers ({error}): "
        "pip install 'tailreplay[hf]'"
    ) from error

from tailreplay.connector import hf_weights
from tailreplay.connector.calibration import Calibration
from tailreplay.connector.client import NotAsked, StoreClient, default_address
from tailreplay.connector.device_pool import DevicePool
from tailreplay.connector.fetch_plan import FetchPlan, ModelShape
from tailreplay.connector.hf_families import UnsupportedModel
from tailreplay.connector.hf_loads import Loads
from tailreplay.connector.hf_model import HybridModel
from tailreplay.connector.hf_request import Outcome, Request
from tailreplay.connector.hf_run import PromptRun
from tailreplay.connector.hf_write_back import Parts, WriteBack
from tailreplay.connector.identity import model_semantics
from tailreplay.connector.load import LoadFailed
from tailreplay.connector.pace import Pace
from tailreplay.connector.payload import PayloadCodec
from tailreplay.connector.plan import plan_fetch, unless_all_is_computed
from tailreplay.connector.policy import CachePolicy
from tailreplay.connector.report import Report, why_missed
from tailreplay.connector.stored import NOTHING, StoredPrefix, stored_prefix
from tailreplay.connector.triton_guard import guard_triton
from tailreplay.store.chain import PrefixChain
from tailreplay.store.errors import InvalidRequest, TailReplayError
from tailreplay.store.namespace import NamespaceFields, tenant_digest
from tailreplay.store.tokens import extended_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tailreplay.connector.model_dims import ModelDims
    from tailreplay.store.tokens import ExtendedTokens

__all__ = ["CachePolicy", "Generation", "HybridEngine", "UnsupportedModel", "guard_triton"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Generation:
    """What `generate` returns.

    Attributes:
        tokens: the greedy continuation.
        first_logits: `[V]`, from which its first token was taken.
        report: what happened, in tokens, seconds and bytes.
    """

    tokens: list[int]
    first_logits: Tensor
    report: dict[str, Any]


class HybridEngine:
    """Runs prompts on a hybrid model and shares their prefixes through a store.

    A store that is absent, slow or broken costs a request at most the lookup's deadline; the
    answer then comes from plain prefill. One request at a time; `generate` may be called from any
    thread.

    Args:
        model: a Transformers hybrid causal LM in eval mode.
        store: address of the store, or a client that the caller closes; None = the sidecar's.
        policy: how hits are used, unless a request says otherwise.
        tenant: separates what is stored; nothing crosses from one tenant to another.
        weights_id: identity of the weights. None = digest of the weights up to 1 GiB; larger
            models then share with no other process.
        tokenizer_id: identity of the tokenizer.

    Attributes:
        policy: as given.
        namespace: 32 bytes that name what is shared: model, weights, tokenizer, dtype and tenant.
        calibration: how wrong the tails that `auto` chose have been.

    Raises:
        UnsupportedModel: the model is of no family that is known to work, or not in eval mode.
        ValueError: `store` is no address.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - any Transformers model
        store: str | StoreClient | None = None,
        policy: CachePolicy | None = None,
        *,
        tenant: str = "",
        weights_id: str | None = None,
        tokenizer_id: str = "",
    ) -> None:
        self.policy = policy or CachePolicy()
        _check_model(model)
        self._model = HybridModel(model)
        self._codec = PayloadCodec(self._model.dims)
        dims = self._model.dims
        self._shape = _shape_of(dims)
        self._owns_client = not isinstance(store, StoreClient)
        self._client = (
            store if isinstance(store, StoreClient) else StoreClient(store or default_address())
        )
        self.namespace = NamespaceFields(
            model=model_semantics(model.config.to_dict()),
            weights_id=weights_id or hf_weights.weights_id(model),
            tokenizer_id=tokenizer_id,
            tenant_salt=tenant,
            kv_dtype=str(dims.dtype),
        ).digest()
        self._device_pool = _device_pool(self.policy.device_pool_bytes, dims.device)
        self.calibration = Calibration()
        self._pace = Pace()
        self._loads = Loads(self._client, self._codec, self._device_pool)
        self._busy = threading.Lock()
        # Guarded by _busy: whether it is closed, and what is to be stored.
        self._closed = False
        self._write_back = WriteBack(
            Parts(
                client=self._client,
                tenant=tenant_digest(tenant),
                model=self._model,
                codec=self._codec,
                shape=self._shape,
                loads=self._loads,
                device_pool=self._device_pool,
                calibration=self.calibration,
            )
        )
        self._client.connect(self.policy.match_timeout_s)
        logger.info(
            "prefixes are reused at any token; states are kept every %d tokens, gaps of up to %d "
            "tokens are closed exactly",
            self.policy.prefill_chunk_tokens,
            self.policy.max_replay_tokens,
        )

    def __enter__(self) -> HybridEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        token_ids: Sequence[int],
        max_new_tokens: int = 16,
        *,
        policy: CachePolicy | None = None,
    ) -> Generation:
        """Greedy continuation of a prompt, reusing the longest stored prefix.

        Args:
            token_ids: the prompt, at least one token.
            max_new_tokens: how many to return, at least 1.
            policy: in place of the engine's, for this request.

        Raises:
            InvalidRequest: the prompt is empty, too long, or has ids the model does not know.
        """
        tokens = self._checked(token_ids, max_new_tokens)
        if policy is not None and not isinstance(policy, CachePolicy):
            raise InvalidRequest(f"policy is {policy!r}, wanted a CachePolicy")
        with self._busy:
            if self._closed:
                raise InvalidRequest("generate was called on an engine that is closed")
            return self._generate(tokens, max_new_tokens, policy or self.policy)

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Waits until earlier prompts are stored; False when that takes too long."""
        with self._busy:
            waiting = self._write_back.pending()
        return not wait_for(waiting, timeout_s).not_done

    def close(self) -> None:
        """Lets write-backs end, then gives threads and connection back."""
        with self._busy:
            self._closed = True
        self._write_back.close()
        if self._owns_client:
            self._client.close()

    def _generate(
        self, tokens: ExtendedTokens, max_new_tokens: int, policy: CachePolicy
    ) -> Generation:
        report = Report(secrets.token_hex(8), len(tokens), self.namespace)
        request = Request(tokens, PrefixChain(self.namespace, tokens), policy, report)
        ids = torch.as_tensor(tokens.astype("int64"), device=self._model.dims.device)
        run = PromptRun(self._model, self._codec, ids, policy.prefill_chunk_tokens, report)
        stored = self._match(request)
        policy = request.policy
        budget = self.calibration.budget(policy.error_budget)
        within = policy.model_copy(update={"error_budget": budget})
        plan = plan_fetch(stored, len(tokens), within, self._shape)
        plan = unless_all_is_computed(plan, stored, self._shape)
        report.planned(plan)
        outcome = self._run(run, plan, stored, request)
        self._note_pace(outcome, request)
        report.first_token(outcome.load.bytes_by_tier() if outcome.load is not None else {})
        if policy.mode != "off":
            self._write_back.put(run, outcome, request)
        generated = run.decode(outcome.done, max_new_tokens)
        if outcome.done.approximate is not None and policy.exact_repair:
            self._write_back.repair(outcome, request)
        return Generation(generated, outcome.done.logits, report.as_dict())

    def _match(self, request: Request) -> StoredPrefix:
        report = request.report
        if request.policy.mode == "off":
            return NOTHING
        try:
            with report.phase("match"):
                answer = self._client.match(
                    self.namespace, request.tokens, timeout_s=request.policy.match_timeout_s
                )
        except TailReplayError as error:
            logger.debug("%s: prefill instead: %s", type(error).__name__, error)
            if not isinstance(error, NotAsked):
                report.round_trip()
            report.missed(why_missed(error))
            return NOTHING
        report.round_trip()
        report.event("matched")
        request.policy = request.policy.with_default_mode(answer.default_mode)
        stored = stored_prefix(answer)
        report.answered(stored.mismatches)
        return stored

    def _run(
        self, run: PromptRun, plan: FetchPlan, stored: StoredPrefix, request: Request
    ) -> Outcome:
        """The prompt's prefill by its plan; a plain one if nothing is to be loaded, or if it fails.

        What did not come is put again, so nothing counts as stored after a failure.
        """
        policy = request.policy
        load = self._loads.of(plan, request) if plan.ranges else None
        if load is not None and load.ranges and policy.mode == "auto" and policy.weigh_time:
            tier = stored.slowest_tier(load.ranges)
            plan = self._pace.checked(plan, tier, load.size_bytes)
            request.report.planned(plan)
        if load is None or plan.mode == "miss":
            is_off = policy.mode == "off"
            done = run.plain() if is_off else run.cold(keep=plan.matched_tokens)
            return Outcome(done, plan, stored, None)
        try:
            self._loads.start(load, stored, request)
            return Outcome(run.hit(plan, load), plan, stored, load)
        except LoadFailed as failure:
            load.cancel()
            logger.debug("a load failed, prefill instead: %s", failure)
            request.report.missed(failure.reason)
        cold = run.cold(keep=plan.matched_tokens)
        return Outcome(cold, FetchPlan("miss", True, 0), NOTHING, None)

    def _note_pace(self, outcome: Outcome, request: Request) -> None:
        """Notes how long the prompt's prefill and load have taken."""
        report, load = request.report, outcome.load
        # A tail from tokens waits for keys and values before the suffix, all others in it.
        waited_s = 0.0 if outcome.plan.from_tokens else report.seconds("kv")
        prefilled_s = report.seconds("suffix") - waited_s
        self._pace.prefilled(len(request.tokens) - outcome.plan.prefill_from, prefilled_s)
        if load is not None and load.seconds:
            sizes = load.bytes_by_tier()
            tier = "redis" if any(tier == "redis" for tier, _ in sizes) else "cpu"
            size = sum(size for (tier, _), size in sizes.items() if tier != "gpu")
            self._pace.loaded(tier, size, load.seconds)

    def _checked(self, token_ids: Sequence[int], max_new_tokens: int) -> ExtendedTokens:
        tokens = extended_tokens(token_ids)
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise InvalidRequest(f"max_new_tokens is {max_new_tokens!r}, wanted a number from 1 on")
        config = self._model.config
        room = config.max_position_embeddings - max_new_tokens
        if not 1 <= len(tokens) <= room:
            raise InvalidRequest(
                f"prompt has {len(tokens)} tokens, wanted 1 to {room} "
                f"({config.max_position_embeddings} positions less {max_new_tokens} new tokens)"
            )
        if int(tokens.max()) >= config.vocab_size:
            raise InvalidRequest(
                f"token id {int(tokens.max())} is unknown, wanted below {config.vocab_size}"
            )
        return tokens


def _shape_of(dims: ModelDims) -> ModelShape:
    return ModelShape(
        len(dims.fa_layers),
        dims.kv_heads,
        len(dims.hidden_sources),
        tails_by_group=True,
        replays_tokens=True,
    )


def _device_pool(size: int, device: torch.device) -> DevicePool | None:
    return DevicePool(torch.empty(size, dtype=torch.uint8, device=device)) if size else None


def _check_model(model: Any) -> None:  # noqa: ANN401 - whatever the caller has
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "config"):
        raise UnsupportedModel(f"model is {model!r:.80}, wanted a causal LM of Transformers")
    if model.training:
        raise UnsupportedModel("model is in training mode, wanted eval mode: call model.eval()")
