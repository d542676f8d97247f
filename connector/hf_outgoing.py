"""What a prompt that has run leaves for the store, as objects."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from tailreplay.connector.outgoing import outgoing
from tailreplay.connector.plan import plan_put
from tailreplay.connector.tail_figures import pack, unpack
from tailreplay.replay.tail_error import span_tails
from tailreplay.store.objects import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tailreplay.connector.hf_model import HybridModel
    from tailreplay.connector.hf_run import Prefilled
    from tailreplay.connector.payload import PayloadCodec
    from tailreplay.connector.put_frames import ObjectBytes
    from tailreplay.connector.stored import StoredPrefix
    from tailreplay.replay.linear_state import LinearState
    from tailreplay.store.chain import PrefixChain


class Outgoing:
    """Objects of one prompt, each packed when it is sent.

    Args:
        namespace: the engine's, 32 bytes.
        chain: names the prompt's prefixes.
        model: that has run.
        codec: packs what it has computed.
    """

    def __init__(
        self, namespace: bytes, chain: PrefixChain, model: HybridModel, codec: PayloadCodec
    ) -> None:
        self._namespace = namespace
        self._chain = chain
        self._model = model
        self._codec = codec

    def missing(
        self, done: Prefilled, stored: StoredPrefix, prompt_tokens: int
    ) -> Iterator[ObjectBytes]:
        """What the store lacks of a prompt.

        Args:
            done: the prompt's prefill, exact.
            stored: what the store has of it.
            prompt_tokens: its length.
        """
        wanted = [*plan_put(stored, prompt_tokens, done.hidden_from)]
        figures = self._tail_figures(done, stored, wanted)
        packed: Callable[[], memoryview | Sequence[memoryview]]
        for kind, first, end in wanted:
            if kind is Kind.KV:
                packed = partial(self._codec.pack_kv, done.kv, first, end)
            elif done.hidden:
                start = done.hidden_from
                packed = partial(self._codec.hidden_parts, done.hidden, first - start, end - start)
            else:
                continue
            own = figures.get(first, b"") if kind is Kind.HIDDEN else b""
            yield self._object(kind, (first, end), packed, own)
        known = {checkpoint.token for checkpoint in stored.checkpoints}
        for token in sorted(done.states.keys() - known):
            yield self.checkpoint(done.states[token], token)

    def checkpoint(self, states: Mapping[int, LinearState], token: int) -> ObjectBytes:
        """The states of all linear layers after `token` tokens, by layer."""
        packed = partial(self._codec.pack_checkpoint, states)
        return self._object(Kind.CHECKPOINT, (token - 1, token), packed)

    def _tail_figures(
        self, done: Prefilled, stored: StoredPrefix, wanted: Sequence[tuple[Kind, int, int]]
    ) -> dict[int, bytes]:
        """How long a tail must be in each page that is to be put, by the page's first token."""
        pages = [(first, end) for kind, first, end in wanted if kind is Kind.HIDDEN]
        if not pages or not self._model.dims.hidden_sources:
            return {}
        known = torch.from_numpy(unpack(stored.figures_at(done.trace.first)))
        groups = self._model.group_places
        # One is of all groups together; of another number they are not this model's.
        are_ours = len(known) in (1, len(groups))
        tails = span_tails(done.trace, groups, pages, known if are_ours else None)
        return {first: pack(tails[i].numpy()) for i, (first, _) in enumerate(pages)}

    def _object(
        self,
        kind: Kind,
        span: tuple[int, int],
        packed: Callable[[], memoryview | Sequence[memoryview]],
        figures: bytes = b"",
    ) -> ObjectBytes:
        geometry = self._codec.geometry[kind]
        return outgoing(self._namespace, self._chain, geometry, span, packed, figures)
