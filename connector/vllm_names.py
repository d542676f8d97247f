"""What a request's prefix is named by: namespace and extended tokens."""
# ruff: noqa: ANN401 - vLLM's own objects are untyped here

from __future__ import annotations

import logging
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from tailreplay.connector.identity import model_semantics
from tailreplay.connector.vllm_config import digest_files, weights_id
from tailreplay.store.namespace import NamespaceFields
from tailreplay.store.tokens import extended_tokens

if TYPE_CHECKING:
    from tailreplay.connector.vllm_config import VllmSettings
    from tailreplay.store.tokens import ExtendedTokens

logger = logging.getLogger(__name__)


class Namespaces:
    """Namespace digests of an engine's requests; any thread.

    Args:
        vllm_config: the engine's config.
        settings: the connector's.
    """

    def __init__(self, vllm_config: Any, settings: VllmSettings) -> None:
        model = vllm_config.model_config
        self._fields = NamespaceFields(
            model=model_semantics(model.hf_config.to_dict()),
            weights_id=weights_id(vllm_config, settings),
            tokenizer_id=settings.tokenizer_id,
            tenant_salt=settings.tenant,
            kv_dtype=str(model.dtype),
            quantisation=model.quantization,
        )
        self._lock = threading.Lock()
        # Guarded by _lock: digests by (cache salt, adapter), and of adapters by (id, path, files).
        self._digests: dict[tuple[str, str | None], bytes] = {}
        self._adapters: dict[tuple[Any, ...], str] = {}

    def of(self, request: Any) -> bytes:
        """The namespace of a request; reads the adapter's files when they are new or changed."""
        salt = request.cache_salt or ""
        with self._lock:
            adapter = self._adapter(request.lora_request)
            key = (salt, adapter)
            if key not in self._digests:
                fields = {"adapter_digest": adapter}
                if salt:
                    fields["tenant_salt"] = f"{self._fields.tenant_salt}\0{salt}"
                self._digests[key] = self._fields.model_copy(update=fields).digest()
            return self._digests[key]

    def _adapter(self, lora: Any) -> str | None:
        if lora is None:
            return None
        files = _files(Path(lora.lora_path))
        key = (lora.lora_int_id, lora.lora_path, tuple(files.items()))
        if key not in self._adapters:
            self._adapters[key] = _digest(list(files)) or secrets.token_hex(32)
        return self._adapters[key]


def _files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Size and time of each file, by which one that is loaded again in place is noticed."""
    try:
        stats = {file: file.stat() for file in sorted(folder.glob("*")) if file.is_file()}
    except OSError:
        return {}
    return {file: (stat.st_size, stat.st_mtime_ns) for file, stat in stats.items()}


def _digest(files: list[Path]) -> str | None:
    """Digest of an adapter; None, so that it is shared with nobody, if it can not be read."""
    try:
        if files:
            return digest_files(files)
    except OSError as error:
        logger.debug("an adapter can not be read: %s", error)
    logger.warning("an adapter has no files here: nothing of it is shared")
    return None


def prompt_tokens(request: Any) -> ExtendedTokens:
    """The prompt's extended tokens: media stand at their own positions."""
    media: dict[int, int] = {}
    for feature in request.mm_features or ():
        place = feature.mm_position
        for offset in range(place.length):
            media[place.offset + offset] = media_element(feature.identifier, offset)
    return extended_tokens(request.prompt_token_ids or [], media)


def media_element(identifier: str, offset: int) -> int:
    """Extended token of position `offset` of a medium: 64 bits above the range of token ids."""
    data = f"{len(identifier)}:{identifier}:{offset}".encode()
    value = int.from_bytes(blake3(data).digest(length=8), "little")
    return value | 1 << 63
