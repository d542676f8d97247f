"""Lookups of the scheduler's side: on threads of their own, so that a step does no I/O."""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import logging
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from tailreplay.connector.client import StoreClient
from tailreplay.connector.report import why_missed
from tailreplay.connector.stored import NOTHING, stored_prefix
from tailreplay.connector.vllm_config import APPROXIMATE
from tailreplay.connector.vllm_meta import IDLE_S
from tailreplay.connector.vllm_names import Namespaces
from tailreplay.connector.vllm_plan import Asked
from tailreplay.store.errors import TailReplayError

if TYPE_CHECKING:
    from collections.abc import Collection

    from tailreplay.connector.policy import CachePolicy, Mode
    from tailreplay.connector.vllm_config import VllmSettings
    from tailreplay.store.tokens import ExtendedTokens

logger = logging.getLogger(__name__)

_THREADS = 4


class Lookups:
    """Asks the store what it has of prompts.

    Args:
        vllm_config: the engine's config.
        settings: the connector's.

    Attributes:
        namespaces: names prompts.
    """

    def __init__(self, vllm_config: Any, settings: VllmSettings) -> None:
        self.namespaces = Namespaces(vllm_config, settings)
        self._settings = settings
        caching = vllm_config.cache_config.enable_prefix_caching
        self._strict = caching and settings.strict
        self._client = StoreClient(
            settings.store,
            match_timeout_s=settings.match_timeout_s,
            credentials=settings.credentials,
        )
        # Whether the last lookup that is over had an answer; written by threads.
        self._answers = False
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tailreplay-match")
        self._threads.submit(self._greet)

    def policy(self, request: Any) -> CachePolicy:
        """The request's own mode where it names one that is allowed, else the engine's."""
        wanted = (request.kv_transfer_params or {}).get("tailreplay") or {}
        mode: Mode = wanted.get("mode", self._settings.mode)
        if self._strict and mode in APPROXIMATE:
            mode = "exact"
        try:
            return self._settings.policy(mode)
        except ValidationError:
            logger.debug("a request wants an unknown mode, the engine's is used")
            return self._settings.policy(self._settings.mode)

    def patience_s(self, *, busy: bool) -> float:
        """How long a lookup may take.

        Longer where the engine has other work meanwhile, unless the last one had no answer: a
        store that is gone costs no more than a lookup's deadline.

        Args:
            busy: whether it has.
        """
        grace_s = self._settings.match_grace_s if busy and self._answers else 0.0
        return self._settings.match_timeout_s + grace_s

    def ask(self, request: Any, tokens: ExtendedTokens, policy: CachePolicy) -> Future[Asked]:
        """Begins a lookup."""
        return self._threads.submit(self._ask, request, tokens, policy)

    def close(self) -> None:
        """Lets running lookups end, each within its deadline, then gives the connection back."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _greet(self) -> None:
        """Connects, so that the first lookup need not; runs on a thread."""
        if not self._client.connect(self._settings.match_timeout_s):
            logger.warning(
                "the store at %s does not answer yet: prompts are prefilled until it does",
                self._settings.store,
            )

    def _ask(self, request: Any, tokens: ExtendedTokens, policy: CachePolicy) -> Asked:
        """Runs on a thread of its own. Never raises what a request would have to know of."""
        try:
            namespace = self.namespaces.of(request)
        except Exception:  # whatever it is, the request can be served without a cache
            logger.exception("a prompt has no name: it is prefilled, and not stored")
            return Asked(b"", NOTHING, "not_named")
        if policy.mode == "off":
            return Asked(namespace, NOTHING)
        try:
            answer = self._client.match(namespace, tokens, timeout_s=self.patience_s(busy=True))
            self._answers = True
        except TailReplayError as error:
            self._answers = False
            logger.debug("prefill instead: %s", error)
            return Asked(namespace, NOTHING, why_missed(error))
        return Asked(namespace, stored_prefix(answer))


def rest(asked: Collection[Future[Asked]]) -> None:
    """Gives the processor to the lookups, for a moment, when there is nothing else to run.

    vLLM would ask again at once, and again, and keep them from the interpreter.
    """
    if waiting := [one for one in asked if not one.done()]:
        wait(waiting, IDLE_S, return_when=FIRST_COMPLETED)
