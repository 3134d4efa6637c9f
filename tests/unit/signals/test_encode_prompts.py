from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ullim.errors import BadInput
from ullim.records import Message
from ullim.signals.prompts import RawPrompt, encode_prompts

TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'forbidden' %}{{ raise_exception('not that') }}{% endif %}"
    "{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    words = ["[UNK]", "[BOS]", "user", "assistant", "a", "b"]
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", bos_token="[BOS]")
    made.chat_template = TEMPLATE
    return made


def prompts(*texts: str) -> list[RawPrompt]:
    return [RawPrompt(f"p{i}", (Message("user", text),)) for i, text in enumerate(texts)]


def encode(tokenizer: Any, raw: list[RawPrompt], **limits: int) -> Any:
    return encode_prompts(raw, tokenizer, **{"max_tokens": 100, "max_new_tokens": 10, "context": 200, **limits})


def test_the_template_opens_the_assistants_turn_and_adds_no_token_of_its_own(tokenizer: Any) -> None:
    [(prompt_id, messages, ids)], left_out = encode(tokenizer, prompts("a b"))
    assert (prompt_id, messages) == ("p0", (Message("user", "a b"),))
    assert ids.tolist() == [2, 4, 5, 3]  # no [BOS]: the template writes its own where a model wants one
    assert ids.dtype == np.int32
    assert left_out == {}


def test_long_prompts_are_left_out_whole_and_counted(tokenizer: Any) -> None:
    encoded, left_out = encode(tokenizer, prompts("a", "a a a", "a a"), max_tokens=4)
    assert [prompt_id for prompt_id, _, _ in encoded] == ["p0", "p2"]
    assert left_out == {"longer than prompts.max_tokens (4)": 1}


def test_prompt_and_answer_must_fit_the_context_together(tokenizer: Any) -> None:
    encoded, left_out = encode(tokenizer, prompts("a", "a a a"), max_new_tokens=10, context=14)
    assert [len(ids) for _, _, ids in encoded] == [3]
    assert left_out == {"longer than the context (14) less sampling.max_new_tokens (10)": 1}


def test_nothing_that_fits_is_an_error_with_the_shortest_length(tokenizer: Any) -> None:
    with pytest.raises(BadInput, match=r"all 2 prompts are longer than prompts.max_tokens \(2\); the shortest has 3"):
        encode(tokenizer, prompts("a a", "a"), max_tokens=2)


def test_a_prompt_that_the_template_refuses_is_named(tokenizer: Any) -> None:
    with pytest.raises(BadInput, match="prompt 'p1': the chat template refuses it: not that"):
        encode(tokenizer, prompts("a", "forbidden"))


def test_a_tokenizer_without_a_template_is_told(tokenizer: Any) -> None:
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match=r"no chat template; name one with policy\.chat_template"):
        encode(tokenizer, prompts("a"))
