import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.assets import chitchat
from ullim.assets.chitchat import PROMPTS_HELDOUT, PROMPTS_TRAIN, REWARD_FIT, REWARD_MEASURE, part, prompts_of
from ullim.signals.chitchat import Conversation, Turn
from ullim.signals.prompts import read_prompts


def conversation(name: str, *texts: str) -> Conversation:
    return Conversation(name, "Films?", tuple(Turn("ab"[i % 2], (text,), None) for i, text in enumerate(texts)), {})


def test_the_four_parts_cover_everything_once() -> None:
    conversations = [conversation(f"c{i}", "x", "y") for i in range(500)]
    parts = [part(conversations, stretch) for stretch in (REWARD_FIT, REWARD_MEASURE, PROMPTS_TRAIN, PROMPTS_HELDOUT)]
    names = [c.conversation_id for members in parts for c in members]
    assert sorted(names) == sorted(c.conversation_id for c in conversations)
    assert [len(members) > 10 for members in parts] == [True] * 4


def test_a_prompt_ends_with_a_turn_that_was_answered() -> None:
    prompts = dict(prompts_of(conversation("c", "one", "two", "three", "four")))
    assert {prompt_id: [m.content for m in messages[1:]] for prompt_id, messages in prompts.items()} == {
        "c:0": ["one"],
        "c:1": ["two"],
        "c:2": ["one", "two", "three"],
    }
    assert all(messages[0].role == "system" and "Films?" in messages[0].content for messages in prompts.values())


def test_long_turns_cost_the_older_ones_first_and_then_the_prompt() -> None:
    long = "x" * 319
    prompts = dict(prompts_of(conversation("c", long, "b", "c", "y" * 321, "e")))
    assert [m.content for m in prompts["c:2"][1:]] == ["c"]
    assert [m.content for m in prompts["c:0"][1:]] == [long]
    assert "c:3" not in prompts


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12))
@settings(deadline=None, max_examples=50)
def test_every_prompt_is_one_that_any_template_takes(lengths: list[int]) -> None:
    made = list(prompts_of(conversation("c", *("x" * length for length in lengths))))
    assert len(made) <= 3
    assert len({prompt_id for prompt_id, _ in made}) == len(made)
    for _, messages in made:
        roles = [message.role for message in messages]
        assert roles in (["system", "user"], ["system", "user", "assistant", "user"])
        assert sum(len(message.content) for message in messages[1:]) <= 320


def test_the_files_are_prompts_files_that_share_no_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations = [conversation(f"c{i}", "one", "안녕", "three") for i in range(200)]
    monkeypatch.setattr(chitchat, "read_conversations", lambda: conversations)
    shares: list[float] = []
    chitchat.build_prompts(tmp_path, lambda text, share: shares.append(share))
    train, heldout = (read_prompts(tmp_path / name) for name in ("train.jsonl", "heldout.jsonl"))
    seen = [{prompt.prompt_id.split(":")[0] for prompt in prompts} for prompts in (train, heldout)]
    assert seen[0]
    assert seen[1]
    assert not seen[0] & seen[1]
    fitted = {c.conversation_id for stretch in (REWARD_FIT, REWARD_MEASURE) for c in part(conversations, stretch)}
    assert not fitted & (seen[0] | seen[1])
    assert "안녕" in (tmp_path / "train.jsonl").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()[0]).keys() == {
        "id",
        "messages",
    }
    assert shares[-1] == 1.0
