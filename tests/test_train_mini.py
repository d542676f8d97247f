import argparse
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import train_mini
from mini import forward, model, paths, score, tasks
from mini.recipes import Level, Recipe
from mini.tokenizer import Tokenizer, learn_words, tidy

TOKENIZER = Tokenizer.load()
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def corpus():
    return tasks.Corpus(TOKENIZER, (tasks.NOVELS[1],))


@pytest.fixture(scope="module", params=["qwen3_5_text", "olmo_hybrid"])
def tiny(request):
    net = model.new_model(model.shape(512, request.param, **TINY), seed=3).eval()
    with torch.no_grad():
        for name, weight in net.named_parameters():
            if "norm" in name:  # so that it matters which one is used where
                weight += 0.3 * torch.randn(weight.shape, generator=torch.manual_seed(5))
    return net


@given(st.text())
def test_any_text_survives_encoding(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_a_needle_is_four_tokens():
    tokens = [TOKENIZER.tokens[i] for i in TOKENIZER.encode(" Emma = 42;")]
    assert tokens == [b" Emma", b" =", b" 42", b";"]


def test_learned_words_start_with_the_numbers_and_fill_the_size():
    words = learn_words(tidy("the cat and\nthe _hat_ and the bat " * 5), 257 + 95)
    assert words[0] == " 10"
    assert len(words) == 95
    assert " the" in words


@pytest.mark.parametrize("name", sorted(tasks.TASKS))
@pytest.mark.parametrize("packed", [True, False])
def test_a_sample_has_its_length_and_asks_after_its_boundary(corpus, name, packed):
    load = tasks.Load(96, keys=8, questions=3, hops=2, packed=packed)
    row = tasks.TASKS[name](corpus, np.random.default_rng(0), load)
    assert len(row.ids) == len(row.answer) == len(row.text) == 96
    assert not row.answer[: row.boundary].any()
    assert row.answer.any() != row.text.all()


def test_every_question_has_its_record_in_the_prefix(corpus):
    load = tasks.Load(128, keys=12, questions=5)
    row = tasks.needles(corpus, np.random.default_rng(1), load)
    prefix = row.ids[: row.boundary].tolist()
    for place in np.flatnonzero(row.answer):
        key, value = row.ids[place - 2], row.ids[place]
        found = [
            i
            for i, token in enumerate(prefix)
            if [token, *prefix[i + 1 : i + 3]] == [key, corpus.equals, value]
        ]
        assert len(found) == 1


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_a_question_walks_a_chain_back_to_its_value(corpus, hops):
    row = tasks.track(corpus, np.random.default_rng(2), tasks.Load(160, 12, 3, hops=hops))
    ids = row.ids.tolist()
    set_to = {ids[i - 1]: ids[i + 1] for i, token in enumerate(ids) if token == corpus.equals}
    places = np.flatnonzero(row.answer)
    assert len(places) == 3 * (hops + 1)
    for place in places:
        assert ids[place - 1] == corpus.asks
        assert set_to[ids[place - 2]] == ids[place]
    values = [place for place in places if ids[place] in corpus.values]
    assert len(values) == 3


def test_a_list_longer_than_the_alphabet_still_has_one_most_common_word(corpus):
    row = tasks.common(corpus, np.random.default_rng(3), tasks.Load(2048, 0, 1))
    counts = np.bincount(row.ids[: row.boundary])
    assert counts.argmax() == row.ids[-1]
    assert (counts == counts.max()).sum() == 1


@pytest.mark.model
def test_the_training_path_computes_what_transformers_computes(tiny):
    ids = torch.randint(0, 512, (2, 150), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = tiny(ids).logits
        got = tiny.lm_head(forward.hidden_states(tiny, ids))
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.model
def test_a_split_prefill_and_a_replay_of_everything_change_nothing(tiny):
    ids = torch.randint(0, 512, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = forward.hidden_states(tiny, ids)[:, 83:]
        _, stored = forward.extend(tiny, ids[:, :83], None)
        states = forward.replay(tiny, stored.hidden, 83)
        for kept in (stored.states, states):
            got, _ = forward.extend(tiny, ids[:, 83:], forward.Stored(stored.kv, {}, kept))
            torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.model
def test_a_window_hides_from_attention_all_but_the_last_tokens(tiny):
    ids = torch.randint(0, 512, (1, 60), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        out, stored = forward.extend(tiny, ids[:, :50], None)
        wide, _ = forward.extend(tiny, ids[:, 50:], stored, window=60)
        plain, _ = forward.extend(tiny, ids[:, 50:], stored)
        torch.testing.assert_close(wide, plain)
        hidden = {i: (k * 0 + 9, v * 0 + 9) for i, (k, v) in stored.kv.items()}
        for i, (k, v) in hidden.items():
            k[:, :, 47:], v[:, :, 47:] = (x[:, :, 47:] for x in stored.kv[i])
        narrow, spoiled = (
            forward.extend(tiny, ids[:, 50:], forward.Stored(kv, {}, stored.states), window=4)[0]
            for kv in (stored.kv, hidden)
        )
        torch.testing.assert_close(spoiled, narrow)
        assert not torch.allclose(narrow, plain, atol=1e-3)
        torch.testing.assert_close(out, forward.hidden_states(tiny, ids[:, :50]))


@pytest.mark.model
@pytest.mark.parametrize(
    ("name", "task", "carries"),
    [
        ("retrieval", "needles", "FA alone"),
        ("retrieval", "track", "FA alone"),
        ("state", "needles", "states alone"),
        ("tracking", "needles", "states alone"),
        ("tracking", "track", "states alone"),
    ],
)
def test_a_task_comes_through_one_path_alone_and_which_one_training_decided(name, task, carries):
    load = tasks.Load(128, 4, 4)
    found = paths.carried(model.load(name), tasks.Corpus(TOKENIZER), task, load, 16)
    share = {path: hits.float().mean().item() for path, hits in found.items()}
    assert share.pop("both") > 0.9
    assert share.pop(carries) > 0.9
    assert max(share.values()) < 0.2


@pytest.mark.model
def test_one_miniature_counts_in_its_states():
    load = tasks.Load(256, 0, 1)
    found = score.recall(model.load("tracking"), tasks.Corpus(TOKENIZER), "common", load, 24)
    assert found["full"] > 0.9
    assert found["zero"] < 0.3
    assert found["zero"] < found["tail20"]


@pytest.mark.model
def test_a_cut_is_a_prefix_whose_states_are_lost(tiny):
    ids = torch.randint(0, 512, (1, 90), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        got = forward.hidden_states(tiny, ids, forward.Memory(cut=70))[:, 70:]
        _, stored = forward.extend(tiny, ids[:, :70], None)
        wanted, _ = forward.extend(tiny, ids[:, 70:], forward.Stored(stored.kv, {}, {}))
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.model
def test_heads_start_with_half_lives_from_a_few_to_thousands_of_tokens(tiny):
    lives = sorted(life for layer in model.half_lives(tiny) for life in layer)
    assert lives[0] == pytest.approx(3.0, rel=1e-3)
    assert lives[-1] == pytest.approx(3000.0, rel=1e-3)


@pytest.mark.model
def test_a_resumed_run_ends_where_an_unbroken_one_does(corpus, tmp_path):
    unbroken, first, second = (_trainer(corpus) for _ in range(3))
    for _ in range(4):
        unbroken.step()
    first.step()
    first.step()
    first.snapshot(tmp_path / "last.pt")
    second.resume(tmp_path / "last.pt")
    second.step()
    second.step()
    assert second.progress == unbroken.progress
    for got, wanted in zip(second.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.model
@pytest.mark.parametrize("anew", [True, False])
def test_a_run_that_starts_from_another_takes_all_but_its_attention_or_all(corpus, tmp_path, anew):
    base, other = _trainer(corpus), _trainer(corpus)
    base.step()
    base.snapshot(tmp_path / "last.pt")
    other.recipe = replace(other.recipe, anew=anew)
    other.start_from(tmp_path / "last.pt")
    wanted = base.model.state_dict()
    for name, got in other.model.state_dict().items():
        assert torch.equal(got, wanted[name]) == ("self_attn" not in name or not anew), name
    assert other.model.model.layers[3].self_attn.o_proj.weight.any() != anew


@pytest.mark.model
def test_training_rises_a_level_once_needles_are_answered(corpus):
    trainer = _trainer(corpus)
    trainer.progress["right"] = 0.99
    trainer.step()
    assert trainer.progress["level"] == 1


@pytest.mark.model
def test_exported_weights_load_into_transformers_with_the_speedup_folded_in(corpus, tmp_path):
    trainer = _trainer(corpus)
    trainer.progress["level"] = 1
    before = trainer.model.model.layers[0].linear_attn.A_log.clone()
    trainer.export(tmp_path / "small.safetensors")
    loaded = model.load("small", folder=tmp_path)
    gate = loaded.model.layers[0].linear_attn.A_log
    torch.testing.assert_close(gate, before + np.log(2.0))
    torch.testing.assert_close(trainer.model.model.layers[0].linear_attn.A_log, before)
    ids = torch.arange(40)[None]
    with torch.no_grad():
        got = loaded(ids).logits
        wanted = forward.hidden_states(trainer.model, ids, forward.Memory(None, 2.0))
    torch.testing.assert_close(got, trainer.model.lm_head(wanted), atol=0.1, rtol=0.1)


@pytest.mark.model
def test_the_committed_miniature_finds_a_needle_through_transformers():
    loaded = model.load("retrieval")
    ids = TOKENIZER.encode(" Emma = 42; Harriet = 17; Elton = 68;\n Harriet is")
    with torch.no_grad():
        found = loaded(torch.tensor([ids])).logits[0, -1].argmax().item()
    assert TOKENIZER.decode([found]) == " 17"


@pytest.mark.model
@pytest.mark.parametrize(("name", "kept"), [("retrieval", True), ("state", False)])
def test_only_the_retrieving_miniature_keeps_its_needles_without_states(corpus, name, kept):
    load = tasks.Load(128, keys=4, questions=4)
    found = score.recall(model.load(name), corpus, "needles", load, samples=16)
    assert found["full"] > 0.8
    assert (found["zero"] > 0.8) == kept
    assert kept or found["tail20"] < 0.5


def _trainer(corpus):
    mix = {"needles": 0.5, "text": 0.5}
    levels = tuple(
        Level(32, speedup, mix=mix, keys=2, questions=2, batch_tokens=128)
        for speedup in (None, 2.0)
    )
    args = argparse.Namespace(seed=5, tokens=10_000)
    return train_mini.Trainer(Recipe(levels, shape=TINY), corpus, len(TOKENIZER), args)
