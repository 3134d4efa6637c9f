import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.errors import BadInput
from ullim.records import Message
from ullim.rewards.rendering import TEMPLATE_FILE, RewardTemplate, load_template, render

CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}"
TALK = (Message("system", "w0"), Message("user", "w1"), Message("assistant", "w2"), Message("user", "w3 w4"))


def shown(tokenizer: Any, template: RewardTemplate, answer: str, max_tokens: int = 64) -> str | None:
    rendered = render(template, TALK, answer, tokenizer, max_tokens=max_tokens)
    return None if rendered is None else tokenizer.decode(rendered["input_ids"])


def test_a_pair_is_the_last_turns_and_the_answer(tokenizer: Any) -> None:
    assert shown(tokenizer, RewardTemplate(context_turns=2), "yes") == "[CLS] w2 w3 w4 [SEP] yes [SEP]"
    assert shown(tokenizer, RewardTemplate(context_turns=9), "yes") == "[CLS] w1 w2 w3 w4 [SEP] yes [SEP]"
    assert shown(tokenizer, RewardTemplate(context_turns=0), "yes") == "[CLS] [SEP] yes [SEP]"


def test_the_segments_of_a_pair_are_told_apart(tokenizer: Any) -> None:
    rendered = render(RewardTemplate(context_turns=1), TALK, "yes no", tokenizer, max_tokens=64)
    assert rendered is not None
    assert rendered["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]


def test_a_pair_that_is_too_long_loses_its_oldest_tokens(tokenizer: Any) -> None:
    template = RewardTemplate(context_turns=3)
    assert shown(tokenizer, template, "yes no", 8) == "[CLS] w2 w3 w4 [SEP] yes no [SEP]"
    assert shown(tokenizer, template, "yes no", 6) == "[CLS] w4 [SEP] yes no [SEP]"
    assert shown(tokenizer, template, "yes no", 5) == "[CLS] [SEP] yes no [SEP]"
    assert shown(tokenizer, template, "yes no", 4) is None


@given(before=st.lists(st.integers(1, 12), max_size=4), answer=st.integers(0, 20), limit=st.integers(4, 30))
@settings(deadline=None, max_examples=50)
def test_the_answer_is_whole_or_there_is_nothing(tokenizer: Any, before: list[int], answer: int, limit: int) -> None:
    messages = [Message("user", " ".join(f"w{i}" for i in range(count))) for count in before]
    words = ["yes"] * answer
    rendered = render(RewardTemplate(context_turns=4), messages, " ".join(words), tokenizer, max_tokens=limit)
    if answer + 3 > limit:
        assert rendered is None
    else:
        assert rendered is not None
        ids = rendered["input_ids"]
        assert len(ids) == min(limit, sum(before) + answer + 3)
        assert tokenizer.convert_ids_to_tokens(ids[len(ids) - answer - 1 :]) == [*words, "[SEP]"]
        assert all(len(values) == len(ids) for values in rendered.values())


@pytest.fixture
def chat_tokenizer(tokenizer: Any) -> Any:
    copy = deepcopy(tokenizer)
    copy.chat_template = CHAT
    return copy


def test_a_chat_loses_whole_turns_and_always_starts_with_the_users(chat_tokenizer: Any) -> None:
    def chat(max_tokens: int) -> str | None:
        rendered = render(RewardTemplate(style="chat"), TALK, "yes", chat_tokenizer, max_tokens=max_tokens)
        return None if rendered is None else " ".join(chat_tokenizer.convert_ids_to_tokens(rendered["input_ids"]))

    # Role marks are not in the vocabulary, so each shows as [UNK].
    assert chat(11) == "[UNK] w0 [UNK] w1 [UNK] w2 [UNK] w3 w4 [UNK] yes"
    assert chat(10) == "[UNK] w0 [UNK] w3 w4 [UNK] yes"
    assert chat(7) == "[UNK] w0 [UNK] w3 w4 [UNK] yes"
    assert chat(6) is None


def test_the_template_travels_with_the_checkpoint(tmp_path: Path, tokenizer: Any) -> None:
    template = RewardTemplate(style="pair", context_turns=5, separator=" | ", max_tokens=33)
    template.save(tmp_path)
    assert load_template(tmp_path, tokenizer) == template


def test_without_a_template_the_tokenizer_decides(tmp_path: Path, tokenizer: Any, chat_tokenizer: Any) -> None:
    assert load_template(tmp_path, tokenizer).style == "pair"
    assert load_template(tmp_path, chat_tokenizer).style == "chat"


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 2}', '{"format": 1, "style": "poem"}', '{"format": 1, "colour": 3}', "\udce9"],
)
def test_a_broken_template_is_named(tmp_path: Path, tokenizer: Any, text: str) -> None:
    (tmp_path / TEMPLATE_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(BadInput, match=TEMPLATE_FILE):
        load_template(tmp_path, tokenizer)


def test_the_saved_file_is_plain_json(tmp_path: Path) -> None:
    RewardTemplate().save(tmp_path)
    assert json.loads((tmp_path / TEMPLATE_FILE).read_text(encoding="utf-8"))["format"] == 1
