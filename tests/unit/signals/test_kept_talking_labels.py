from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.records import Message
from ullim.signals.chitchat import Conversation, Turn
from ullim.signals.kept_talking import POSITIVES_PER_CONVERSATION, _band, as_messages, kept_talking_examples


def conversation(name: str, turns: int, *, ended: bool = True) -> Conversation:
    made = tuple(Turn("ab"[i % 2], (f"{name}-{i}",), None) for i in range(turns))
    return Conversation(name, None, made, {"witty": 5.0} if ended else {})


def test_the_last_turn_is_negative_and_one_with_two_more_partner_turns_is_positive() -> None:
    # Of `long` (5 turns) only the answer at place 1 is followed by two more turns of the partner (places 2 and 4).
    examples = kept_talking_examples(
        [conversation("short", 2), conversation("long", 5)], pairs=9, context_turns=3, seed=0
    )
    assert [(e.conversation_id, e.answer, e.label, e.position) for e in examples] == [
        ("short", "short-1", False, 1),
        ("long", "long-1", True, 1),
    ]
    assert examples[1].messages == (Message("user", "long-0"),)


def test_one_more_partner_turn_is_neither() -> None:
    # In a conversation of 4, the answer at place 1 has places 2 and 3 after it: the partner wrote once more.
    assert kept_talking_examples([conversation("a", 2), conversation("b", 4)], pairs=9, context_turns=3, seed=0) == []


def test_logs_that_may_have_been_cut_give_nothing_of_either_kind() -> None:
    cut = [conversation(f"cut{i}", n, ended=False) for i, n in enumerate((2, 5, 9, 30))]
    whole = [conversation("whole", 2), conversation("other", 5)]
    examples = kept_talking_examples([*cut, *whole], pairs=99, context_turns=2, seed=0)
    assert {e.conversation_id for e in examples} <= {"whole", "other"}
    assert examples


@given(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=40), seed=st.integers(0, 5))
@settings(deadline=None, max_examples=50)
def test_place_says_nothing_of_the_label(lengths: list[int], seed: int) -> None:
    conversations = [conversation(f"c{i}", length) for i, length in enumerate(lengths)]
    examples = kept_talking_examples(conversations, pairs=1000, context_turns=3, seed=seed)
    negatives, positives = examples[0::2], examples[1::2]
    assert all(not e.label for e in negatives)
    assert all(e.label for e in positives)
    for negative, positive in zip(negatives, positives, strict=True):
        assert negative.conversation_id != positive.conversation_id
        assert _band(negative.position) == _band(positive.position)
    by_name = {c.conversation_id: c for c in conversations}
    assert all(e.position == len(by_name[e.conversation_id].turns) - 1 for e in negatives)
    assert all(len(by_name[e.conversation_id].turns) - 1 - e.position >= 3 for e in positives)
    assert max(Counter(e.conversation_id for e in negatives).values(), default=0) <= 1
    assert max(Counter(e.conversation_id for e in positives).values(), default=0) <= POSITIVES_PER_CONVERSATION
    assert len({(e.conversation_id, e.position) for e in examples}) == len(examples)


def test_seed_decides_and_pairs_bounds() -> None:
    conversations = [conversation(f"c{i}", 2 + i % 20) for i in range(100)]
    once = kept_talking_examples(conversations, pairs=10, context_turns=3, seed=4)
    assert once == kept_talking_examples(conversations, pairs=10, context_turns=3, seed=4)
    assert once != kept_talking_examples(conversations, pairs=10, context_turns=3, seed=5)
    assert len(once) == 20


@pytest.mark.parametrize(
    ("count", "roles"), [(0, []), (1, ["user"]), (2, ["assistant", "user"]), (3, ["user", "assistant", "user"])]
)
def test_whoever_answers_next_is_the_assistant(count: int, roles: list[str]) -> None:
    assert [m.role for m in as_messages(conversation("c", count).turns)] == roles
