import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from ullim.errors import BadInput
from ullim.signals.chitchat import read_conversations


def message(sender: str, text: str, timestamp: str = "2018-05-02T19:38:15Z") -> dict[str, str]:
    return {"sender": sender, "text": text, "timestamp": timestamp}


def written(tmp_path: Path, data: Any) -> Path:
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


def test_messages_of_one_sender_become_one_turn(tmp_path: Path) -> None:
    turns = [
        [message("a", "Hello"), message("a", " How are you? ")],
        [message("b", "Fine")],
        [message("b", "And you?")],  # the log sometimes starts a new turn for the same person
        [message("a", "  "), message("b", "Hello?")],
        [message("a", "Here")],
    ]
    [conversation] = read_conversations(written(tmp_path, {"c1": {"messages": turns, "prompt": "Films?"}}))
    assert [(turn.sender, turn.texts) for turn in conversation.turns] == [
        ("a", ("Hello", "How are you?")),
        ("b", ("Fine", "And you?", "Hello?")),
        ("a", ("Here",)),
    ]
    assert conversation.turns[0].text == "Hello\nHow are you?"
    assert (conversation.conversation_id, conversation.topic, conversation.ended) == ("c1", "Films?", False)


def test_times_without_a_zone_are_utc_and_unreadable_ones_are_none(tmp_path: Path) -> None:
    stamps = ["2018-05-02T19:38:15Z", "2018-05-02T19:38:15", "2018-05-02T21:38:15+02:00", "yesterday"]
    turns = [[message("ab"[i % 2], "x", stamp)] for i, stamp in enumerate(stamps)]
    [conversation] = read_conversations(written(tmp_path, {"c": {"messages": turns}}))
    moment = datetime(2018, 5, 2, 19, 38, 15, tzinfo=UTC)
    assert [turn.sent_at for turn in conversation.turns] == [moment, moment, moment, None]


def test_ratings_are_numbers_or_left_out(tmp_path: Path) -> None:
    ratings = {"witty": 7, "upbeat": "8", "interesting": None, "other": "very", "nan": "nan"}
    data = {"c": {"messages": [[message("a", "x")]], "ratings": ratings}}
    [conversation] = read_conversations(written(tmp_path, data))
    assert dict(conversation.ratings) == {"witty": 7.0, "upbeat": 8.0}
    assert conversation.ended


def test_conversations_come_in_order_of_id_and_empty_ones_do_not(tmp_path: Path) -> None:
    data = {"b": {"messages": [[message("a", "x")]]}, "c": {"messages": []}, "a": {"messages": [[message("a", "x")]]}}
    assert [c.conversation_id for c in read_conversations(written(tmp_path, data))] == ["a", "b"]


@pytest.mark.parametrize("data", [[], {"c": {}}, {"c": {"messages": [[{"sender": "a"}]]}}, {"c": {"messages": 3}}, 5])
def test_another_file_is_refused_by_name(tmp_path: Path, data: Any) -> None:
    if data == []:
        assert read_conversations(written(tmp_path, {})) == []
        return
    with pytest.raises(BadInput, match=r"dataset\.json: not the conversations"):
        read_conversations(written(tmp_path, data))


def test_an_absent_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BadInput, match=r"chitchat-dataset is not installed; run `make demo`.*ullim\[demo\]"):
        read_conversations()
