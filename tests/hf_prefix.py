"""A prompt that was prefilled once, and hits made of what it left."""

import torch
from tiny_models import random_tokens, relative_l2, relative_max, tiny_qwen

from tailreplay.connector.hf_model import HybridModel

STATE_BOUND = 1e-5
"""Relative L2 per layer, fp32: rounding carried through up to seven layers."""
LOGITS_BOUND = 1e-4
"""max|a - b| / max|b|, fp32."""
SUFFIX = 20


class Prefix:
    """A prompt that was prefilled once, with all that a cache would have kept of it."""

    def __init__(self, dtype=torch.float32, tokens=320, make=tiny_qwen, seed=0):
        self.model = HybridModel(make(dtype, seed))
        self.tokens = random_tokens(tokens)
        cache = self.model.new_cache()
        with self.model.watch.capture() as self.hidden:
            self.model.forward(self.tokens, cache)
        self.kv = {layer: cache.kv(layer) for layer in self.model.dims.fa_layers}

    def prefill(self, m, chunk=None):
        cache = self.model.new_cache()
        for start in range(0, m, chunk or m):
            self.model.forward(self.tokens[start : min(start + (chunk or m), m)], cache)
        return cache

    def states(self, m):
        return self.prefill(m).states()

    def with_kv(self, m):
        cache = self.model.new_cache()
        for layer, (keys, values) in self.kv.items():
            cache.install_kv(layer, keys[:, :m], values[:, :m])
        return cache

    def rows(self, group, start, end):
        source = self.tokens if group.source is None else self.hidden.rows(group.source)
        return source[start:end]

    def replay(self, cache, start, m, initial=None):
        for group in self.model.groups:
            self.model.replay_group(group, self.rows(group, start, m), cache, initial)

    def hit(self, m, k=None, checkpoint=None):
        """KV of m tokens; states from k rows, or from the states at token `checkpoint`."""
        cache = self.with_kv(m)
        if checkpoint is None:
            self.replay(cache, m - (k or m), m)
        elif checkpoint == m:
            cache.set_states(self.states(m))
        else:
            self.replay(cache, checkpoint, m, self.states(checkpoint))
        return cache

    def logits(self, cache, m, suffix=SUFFIX):
        return self.model.forward(self.tokens[m : m + suffix], cache)

    def check_states(self, got, wanted, bound):
        assert sorted(got) == sorted(wanted) == list(self.model.dims.linear_layers)
        for layer, state in wanted.items():
            assert relative_l2(got[layer].conv, state.conv) <= bound, f"conv of layer {layer}"
            error = relative_l2(got[layer].recurrent, state.recurrent)
            assert error <= bound, f"recurrent state of layer {layer}"

    def logits_error(self, cache, m, suffix=SUFFIX):
        """Of a cache, against a prefill split at m."""
        wanted = self.logits(self.prefill(m), m, suffix)
        return relative_max(self.logits(cache, m, suffix), wanted)
