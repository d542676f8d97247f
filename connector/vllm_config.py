"""What an operator sets for the vLLM connector, and what it refuses to start with."""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from typing import Annotated, Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field

from tailreplay.connector.client import default_address
from tailreplay.connector.identity import MAX_DIGESTED_BYTES
from tailreplay.connector.policy import CachePolicy, Mode
from tailreplay.store.credentials import NO_CREDENTIALS, Credentials

logger = logging.getLogger(__name__)

CONNECTOR = "TailReplayConnector"
"""Value of `kv_connector` that turns the connector, and the plugin's capture, on."""

TESTED_VERSIONS = ("0.32",)
"""vLLM releases (major.minor) that the tests run on; with others the connector stays inert."""

APPROXIMATE = ("tail", "auto", "zero")
"""Modes that may leave approximate numbers in the engine's own cache."""


class VllmSettings(BaseModel):
    """Content of `kv_connector_extra_config`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    store: Annotated[str, Field(description="address of the store; default: the sidecar's")] = (
        Field(default_factory=default_address)
    )
    credentials: Annotated[
        Credentials, Field(description="ca, cert, key and token_file for the store")
    ] = NO_CREDENTIALS
    mode: Annotated[Mode, Field(description="how a hit is used, unless a request says")] = "exact"
    replay_ratio: Annotated[
        float, Field(gt=0, le=1, description="r: tail length as a part of the matched tokens")
    ] = 0.05
    min_tail_tokens: Annotated[int, Field(ge=4, description="k_min: shortest tail, tokens")] = 64
    max_replay_tokens: Annotated[
        int, Field(ge=0, description="longest gap behind a state that is closed, tokens")
    ] = 2048
    max_step_tokens: Annotated[
        int, Field(ge=64, description="tokens of gaps and tails run in one engine step")
    ] = 1024
    checkpoint_tokens: Annotated[
        int, Field(ge=1, description="least distance of states kept inside a prompt, tokens")
    ] = 512
    store_outputs: Annotated[bool, Field(description="store what was decoded, too")] = True
    min_answer_tokens: Annotated[
        int, Field(ge=1, description="shortest answer that leaves the state at its end, tokens")
    ] = 64
    store_hiddens: Annotated[
        bool | None, Field(description="store hiddens; default: only where the mode uses them")
    ] = None
    device_pool_bytes: Annotated[
        int,
        Field(
            ge=0,
            description="memory of each rank's device for states, tails of hiddens and keys and "
            "values used last, so that they are not loaded again, bytes; set aside with the "
            "model, so vLLM plans with what is left; 0 = none",
        ),
    ] = 0
    strict: Annotated[
        bool, Field(description="approximate modes are refused with vLLM's prefix caching on")
    ] = True
    weights_id: Annotated[
        str | None, Field(description="identity of the weights; default: digest up to 1 GiB")
    ] = None
    tokenizer_id: Annotated[str, Field(description="identity of the tokenizer")] = ""
    tenant: Annotated[str, Field(description="separates what is stored")] = ""
    match_timeout_s: Annotated[float, Field(gt=0, description="deadline of a lookup, s")] = 0.25
    match_grace_s: Annotated[
        float,
        Field(
            ge=0,
            description="how much longer a lookup is waited for while the engine has other "
            "requests to run, if the one before had an answer, s",
        ),
    ] = 0.25
    stall_timeout_s: Annotated[
        float, Field(gt=0, description="longest pause in a load before it is given up, s")
    ] = 2.0
    put_timeout_s: Annotated[float, Field(gt=0, description="deadline of one write-back, s")] = 60.0

    @property
    def keeps_hiddens(self) -> bool:
        """Whether hiddens are captured and stored."""
        return self.mode in APPROXIMATE if self.store_hiddens is None else self.store_hiddens

    def policy(self, mode: Mode) -> CachePolicy:
        """The policy of one request; a gap is always prefilled again, which alone is exact.

        Replay of the stored sum of hidden and residual would leave 1e-2 on the states, because
        the engine normalises the unrounded sum.
        """
        return CachePolicy(
            mode=mode,
            replay_ratio=self.replay_ratio,
            min_tail_tokens=self.min_tail_tokens,
            max_replay_tokens=self.max_replay_tokens,
            max_reprefill_tokens=self.max_replay_tokens,
            match_timeout_s=self.match_timeout_s,
            stall_timeout_s=self.stall_timeout_s,
            put_timeout_s=self.put_timeout_s,
        )


def settings_of(vllm_config: Any) -> VllmSettings:
    """The settings in a vLLM config.

    Raises:
        ValueError: one is unknown or out of range.
    """
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    return VllmSettings.model_validate(extra or {})


def is_ours(vllm_config: Any) -> bool:
    """Whether this engine is configured to use the connector."""
    transfer = vllm_config.kv_transfer_config
    return transfer is not None and transfer.kv_connector == CONNECTOR


def is_tested(version: str) -> bool:
    """Whether the connector works with this release of vLLM."""
    return ".".join(version.split(".")[:2]) in TESTED_VERSIONS


def check_supported(vllm_config: Any) -> None:
    """Refuses an engine in which the connector would hang, fail or cache wrong bytes.

    Raises:
        ValueError: what is not supported, and what to change.
    """
    for refused, reason in _refusals(vllm_config):
        if refused:
            raise ValueError(f"{CONNECTOR}: {reason}")


def _refusals(vllm_config: Any) -> list[tuple[bool, str]]:
    parallel = vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    settings = settings_of(vllm_config)
    return [
        (
            parallel.pipeline_parallel_size > 1,
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}, wanted 1",
        ),
        (
            parallel.data_parallel_size > 1,
            f"data_parallel_size is {parallel.data_parallel_size}, wanted 1; start several engines",
        ),
        (parallel.enable_expert_parallel, "enable_expert_parallel is on, wanted off"),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism is on, wanted off",
        ),
        (
            vllm_config.speculative_config is not None,
            "speculative decoding is on, wanted off: leave out speculative_config",
        ),
        (parallel.use_sequence_parallel_moe, "sequence-parallel MoE is on, wanted off"),
        (
            transfer.kv_role != "kv_both",
            f"kv_role is {transfer.kv_role!r}, wanted 'kv_both'",
        ),
        (
            transfer.kv_load_failure_policy != "recompute",
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, wanted 'recompute': "
            "with another a lost object would fail its request",
        ),
        (
            settings.strict
            and vllm_config.cache_config.enable_prefix_caching
            and settings.mode in APPROXIMATE,
            f"mode is {settings.mode!r} with prefix caching on: approximate states would enter "
            "vLLM's own cache as exact; wanted mode 'exact', or --no-enable-prefix-caching, or "
            "strict=false",
        ),
    ]


def weights_id(vllm_config: Any, settings: VllmSettings) -> str:
    """Identity of an engine's weights; random where nothing names them."""
    if settings.weights_id is not None:
        return settings.weights_id
    model = vllm_config.model_config
    folder = Path(model.model)
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")])
    if files and sum(f.stat().st_size for f in files) <= MAX_DIGESTED_BYTES:
        return f"files:{digest_files(files)}"
    commit = getattr(model.hf_config, "_commit_hash", None)
    if commit:
        return f"hub:{model.model}@{commit}"
    logger.warning(
        "weights have no identity (more than %d bytes and no weights_id): nothing is shared with "
        "other engines",
        MAX_DIGESTED_BYTES,
    )
    return f"random:{secrets.token_hex(16)}"


def digest_files(files: list[Path]) -> str:
    """Digest over names and contents, hexadecimal."""
    hasher = blake3()
    for file in files:
        content = blake3().update_mmap(file).digest()
        hasher.update(len(file.name).to_bytes(8, "little") + file.name.encode() + content)
    return hasher.hexdigest()
