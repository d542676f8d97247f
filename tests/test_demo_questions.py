"""What the demo asks of its models, and that they know the answers."""

import pytest
import torch

from tailreplay.connector.demo_model import miniature
from tailreplay.connector.demo_questions import LONG, SHORT, Questions
from tailreplay.connector.demo_text import Tokenizer
from tailreplay.connector.hf_model import HybridModel


@pytest.mark.parametrize("context", [LONG, SHORT])
def test_prompts_share_just_what_they_say_and_no_two_go_on_alike(context):
    questions = Questions()
    stored = questions.context(context)
    prompts = [questions.prompt(context) for _ in range(20)]
    assert len(stored) == context.tokens
    assert {len(prompt) for prompt in prompts} == {context.shared + context.suffix}
    assert all(prompt[: context.shared] == stored[: context.shared] for prompt in prompts)
    following = {prompt[context.shared] for prompt in prompts} | {stored[context.shared]}
    assert len(following) == 21


@pytest.mark.parametrize("context", [LONG, SHORT])
def test_the_answer_stands_in_the_shared_part_and_nowhere_else(context):
    questions, tokenizer = Questions(), Tokenizer.load()
    prompt = questions.prompt(context)
    shared, rest = (
        tokenizer.decode(part) for part in (prompt[: context.shared], prompt[context.shared :])
    )
    assert f" Harriet ={Questions.right()};" in shared
    assert Questions.right() not in rest
    assert rest.endswith("\n Harriet is")


@pytest.mark.model
@pytest.mark.parametrize("context", [LONG, SHORT])
def test_a_full_prefill_knows_the_answer(context):
    questions, view = Questions(), HybridModel(miniature(context.model))
    logits = view.forward(torch.tensor(questions.prompt(context)), view.new_cache())
    assert questions.said([int(logits.argmax())]) == Questions.right() == " 17"
