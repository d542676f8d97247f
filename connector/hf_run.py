"""Running one prompt on a Transformers hybrid: a hit by its plan, or a prefill; and what is left.

Everything here runs on the caller's thread, while the load's own thread fills buffers.
"""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tailreplay.connector.fetch_plan import FetchPlan
from tailreplay.connector.plan import prefill_cuts
from tailreplay.replay.hidden_rows import HiddenRows
from tailreplay.replay.linear_state import LinearState
from tailreplay.replay.tail_error import DecayTrace
from tailreplay.store.objects import PAGE_TOKENS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tailreplay.connector.device_load import DeviceLoad
    from tailreplay.connector.hf_cache import HybridCache
    from tailreplay.connector.hf_model import HybridModel
    from tailreplay.connector.load import Load
    from tailreplay.connector.payload import PayloadCodec
    from tailreplay.connector.report import Report

    States = dict[int, LinearState]


@dataclass(slots=True)
class Prefilled:
    """What a prompt leaves behind.

    Attributes:
        cache: after the whole prompt.
        logits: `[V]` after its last token.
        first_token: the most likely one.
        kv: keys and values `[H, n, d]` per FA layer.
        hidden: rows `[n - hidden_from, D]` per source; empty where nothing was to be kept.
        hidden_from: position of the first hidden row.
        states: exact states, by number of tokens seen.
        trace: decays and norms of states in what was prefilled.
        approximate: the states that a tail gave; None where they were exact.
    """

    cache: HybridCache
    logits: Tensor
    first_token: int
    kv: list[tuple[Tensor, Tensor]]
    hidden: list[Tensor]
    hidden_from: int
    states: dict[int, States]
    trace: DecayTrace
    approximate: States | None = None


class PromptRun:
    """One prompt on its way through the model.

    Args:
        model: the model.
        codec: its payloads.
        tokens: `[n]` int64 on the model's device.
        chunk_tokens: prefill step.
        report: gathers phases and events.
    """

    def __init__(
        self,
        model: HybridModel,
        codec: PayloadCodec,
        tokens: Tensor,
        chunk_tokens: int,
        report: Report,
    ) -> None:
        self._model = model
        self._codec = codec
        self._tokens = tokens
        self._chunk_tokens = chunk_tokens
        self._report = report

    def cold(self, keep: int = 0) -> Prefilled:
        """Plain prefill of the whole prompt; the state after `keep` tokens is kept too."""
        return self._prefill(self._model.new_cache(), 0, keep)

    def plain(self) -> Prefilled:
        """As `cold`, but nothing is kept that only storing the prompt would ask for."""
        return self._prefill(self._model.new_cache(), 0, None)

    def hit(self, plan: FetchPlan, load: Load | DeviceLoad) -> Prefilled:
        """Serves the prompt as planned.

        Raises:
            LoadFailed: a part that was planned for does not come.
        """
        cache = self._model.new_cache()
        wait_kv = self._install_kv(cache, plan, load)
        states = self._load_states(plan, load)
        kept: dict[int, States] = {}
        approximate = None
        if plan.replay_first is not None:
            if plan.from_tokens:
                self._replay_tokens(cache, plan, self._zero_states(), wait_kv)
            else:
                self._replay(cache, plan, load, states)
            if not plan.exact:
                approximate = cache.states()
            elif plan.checkpoint_token != plan.used_tokens:
                kept[plan.used_tokens] = cache.states()
        elif plan.prefill_from:
            cache.set_states(states or self._zero_states())
        keep = plan.matched_tokens if plan.exact else None
        done = self._prefill(cache, plan.prefill_from, keep, before_fa=wait_kv)
        done.states |= kept
        done.approximate = approximate
        return done

    def rebuild(
        self, plan: FetchPlan, load: Load | DeviceLoad, kv: Sequence[tuple[Tensor, Tensor]]
    ) -> States:
        """The exact states at a boundary, as `plan_repair` plans it.

        Args:
            plan: says what from.
            load: of its ranges.
            kv: exact keys and values `[H, m or more, d]` per FA layer, for a plan from tokens.

        Raises:
            LoadFailed: a part of it does not come.
        """
        cache, states = self._model.new_cache(), self._load_states(plan, load)
        if not plan.from_tokens:
            self._replay(cache, plan, load, states)
            return cache.states()
        for layer, (keys, values) in zip(self._model.dims.fa_layers, kv, strict=True):
            m = plan.used_tokens
            cache.install_kv(layer, keys[:, :m], values[:, :m])
        self._replay_tokens(cache, plan, states)
        return cache.states()

    def hidden_with_loaded(
        self, done: Prefilled, plan: FetchPlan, load: Load | DeviceLoad
    ) -> Prefilled:
        """Puts loaded hiddens in front of computed ones, back to the start of their page.

        Raises:
            LoadFailed: they do not come; the page can not be stored then.
        """
        page = plan.prefill_from // PAGE_TOKENS * PAGE_TOKENS
        numbers = plan.ranges_of(Kind.HIDDEN)
        if page == done.hidden_from or not numbers:
            return done
        if plan.late_ranges:
            buffer = load.wait(numbers[-1])
            front = [self._codec.unpack_hidden(buffer[i : i + 1]) for i in range(len(done.hidden))]
        else:
            skip = page - (plan.replay_first or 0)
            if skip < 0:
                return done
            front = [self._codec.unpack_hidden(load.wait(i))[skip:] for i in numbers]
        pairs = zip(front, done.hidden, strict=True)
        done.hidden = [torch.cat((a.to(b.device), b)) for a, b in pairs]
        done.hidden_from = page
        return done

    def decode(self, done: Prefilled, max_new_tokens: int) -> list[int]:
        """Greedy continuation, `max_new_tokens` long, from the prompt's first token on."""
        tokens = [done.first_token]
        while len(tokens) < max_new_tokens:
            step = torch.tensor(tokens[-1:], device=self._tokens.device)
            tokens.append(int(self._model.forward(step, done.cache).argmax()))
        return tokens

    def _install_kv(
        self, cache: HybridCache, plan: FetchPlan, load: Load | DeviceLoad
    ) -> Callable[[int], None]:
        """Puts still empty buffers into the cache; returns what waits for a layer's bytes."""
        dims = self._model.dims
        number_of = dict(zip(dims.fa_layers, plan.ranges_of(Kind.KV), strict=False))
        targets: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, number in number_of.items():
            keys, values = self._codec.unpack_kv(load.buffers[number])
            on_device = (keys.to(dims.device), values.to(dims.device))
            targets[layer] = on_device
            cache.install_kv(layer, *on_device)

        def wait(layer: int) -> None:
            number = number_of.pop(layer, None)
            if number is None:
                return
            with self._report.phase("kv"):
                buffer = load.wait(number)
            if isinstance(buffer, np.ndarray) and dims.device.type != "cpu":
                keys, values = self._codec.unpack_kv(buffer)
                targets[layer][0].copy_(keys)
                targets[layer][1].copy_(values)
            self._report.event(f"kv_used:{layer}")

        return wait

    def _load_states(self, plan: FetchPlan, load: Load | DeviceLoad) -> States | None:
        if plan.checkpoint is None:
            return None
        with self._report.phase("tail"):
            return self._codec.unpack_checkpoint(load.wait(0))

    def _replay(
        self, cache: HybridCache, plan: FetchPlan, load: Load | DeviceLoad, states: States | None
    ) -> None:
        """Rebuilds every group's states, each as soon as its rows are in."""
        end = plan.prefill_from
        sources = self._model.dims.hidden_sources
        number_of = dict(zip(sources, plan.ranges_of(Kind.HIDDEN), strict=False))
        firsts = plan.replay_firsts or [plan.replay_first or 0] * len(self._model.groups)
        for group, first in zip(self._model.groups, firsts, strict=True):
            if group.source is None:
                rows = self._tokens[first:end]
            else:
                with self._report.phase("tail"):
                    buffer = load.wait(number_of[group.source])
                rows = self._codec.unpack_hidden(buffer).to(self._model.dims.device)
            initial = None
            if states is not None:
                initial = {layer: states[layer] for layer in group.linear_layers}
            self._report.event(f"replay:{'embeddings' if group.source is None else group.source}")
            with self._report.phase("replay"):
                self._model.replay_group(group, rows, cache, initial)

    def _replay_tokens(
        self,
        cache: HybridCache,
        plan: FetchPlan,
        states: States | None,
        before_fa: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Rebuilds all states from tokens that attend to the KV in `cache`, and add none."""
        model, first = self._model, plan.replay_first or 0
        self._report.event("replay:tokens")
        if states is not None:
            cache.set_states(states)
        earlier = cache.as_of(first)
        with self._report.phase("replay"), model.watch.waiting(before_fa):
            for start in range(first, plan.prefill_from, self._chunk_tokens):
                end = min(start + self._chunk_tokens, plan.prefill_from)
                model.forward(self._tokens[start:end], earlier)

    def _prefill(
        self,
        cache: HybridCache,
        first: int,
        keep: int | None,
        before_fa: Callable[[int], None] = lambda _: None,
    ) -> Prefilled:
        """Runs the model over [first, n) in chunks, keeping states on the way.

        Args:
            cache: after the first `first` tokens.
            first: where to begin.
            keep: where to keep one beside the usual places; None = none is kept, and nothing noted
                that is only stored.
            before_fa: as of `Watch.waiting`.
        """
        model, total = self._model, len(self._tokens)
        watch, dims = model.watch, model.dims
        cuts = prefill_cuts(first, total, self._chunk_tokens, keep)
        ends = prefill_cuts(first, total, self._chunk_tokens, None)
        hidden, trace = HiddenRows(), DecayTrace(dims.linear_layers, first)
        states: dict[int, States] = {}
        with self._report.phase("suffix"), ExitStack() as watching:
            watching.enter_context(watch.waiting(before_fa))
            if keep is not None:
                hidden = watching.enter_context(watch.capture())
                trace = watching.enter_context(watch.trace(first))
                if first:
                    cache.note_states(trace, first)
            for start, end in itertools.pairwise([first, *ends, total]):
                inner = [cut for cut in cuts if start < cut < end]
                with watch.keeping([cut - start for cut in inner]) as kept:
                    logits = model.forward(self._tokens[start:end], cache)
                for cut, state in zip(inner, kept, strict=True):
                    if len(state) == len(dims.linear_layers):  # else a layer did not stop
                        states[cut] = state
                        trace.note_states(cut, [state[at].recurrent for at in dims.linear_layers])
                if keep is not None:
                    cache.note_states(trace, end)
                    if end != total:
                        states[end] = cache.states()
            # Waits for a device, so that the phase is over when the token is there.
            first_token = int(logits.argmax())
        kv = [cache.kv(layer) for layer in dims.fa_layers]
        rows = [hidden.rows(source) for source in dims.hidden_sources if keep is not None]
        return Prefilled(cache, logits, first_token, kv, rows, first, states, trace)

    def _zero_states(self) -> States:
        dims = self._model.dims
        zero = LinearState(
            torch.zeros(dims.conv_shape, dtype=dims.dtype, device=dims.device),
            torch.zeros(dims.recurrent_shape, device=dims.device),
        )
        return dict.fromkeys(dims.linear_layers, zero)
