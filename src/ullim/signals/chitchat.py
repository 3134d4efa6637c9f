"""Conversations of the PyPI package `chitchat-dataset` (MIT licence): two people, one topic, typed in 2018.

The package holds one JSON object per conversation. A turn is all that one person wrote before the other answered.
Either may rate the conversation afterwards, the last thing a person does with it, so a rated conversation is known
to have ended; an unrated log may simply stop.
"""

import importlib.util
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ullim.errors import BadInput


@dataclass(frozen=True, slots=True)
class Turn:
    """What one person wrote before the other answered."""

    sender: str
    texts: tuple[str, ...]  # one per message sent, none empty
    sent_at: datetime | None  # of the first message; UTC where the log gives no zone; None where unreadable

    @property
    def text(self) -> str:
        """The whole turn, one message a line."""
        return "\n".join(self.texts)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One log. Turns alternate between senders."""

    conversation_id: str
    topic: str | None  # the question both were shown at the start
    turns: tuple[Turn, ...]
    ratings: Mapping[str, float]  # numbers only, as given (1 to 10); empty where nobody rated

    @property
    def ended(self) -> bool:
        """Whether the log is known to be whole: somebody rated it."""
        return bool(self.ratings)


def read_conversations(path: Path | None = None) -> list[Conversation]:
    """All conversations with at least one turn, in the order of their ids. `path` is another copy of the file.

    Empty messages are left out and neighbouring turns of one sender are joined. Raises BadInput where the package
    is absent or the file is not what it should be.
    """
    path = path or _package_file()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        conversations = [_conversation(key, data[key]) for key in sorted(data)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: not the conversations of chitchat-dataset 0.9 ({error!r})") from error
    return [conversation for conversation in conversations if conversation.turns]


def _package_file() -> Path:
    spec = importlib.util.find_spec("chitchat_dataset")
    if spec is None or spec.origin is None:
        raise BadInput('the package chitchat-dataset is not installed; run `make demo`, or `pip install "ullim[demo]"`')
    return Path(spec.origin).parent / "dataset.json"


def _conversation(conversation_id: str, data: Mapping[str, Any]) -> Conversation:
    turns: list[Turn] = []
    for message in (message for turn in data["messages"] for message in turn):
        text = message["text"].strip()
        if not text:
            continue
        if turns and turns[-1].sender == message["sender"]:
            turns[-1] = Turn(turns[-1].sender, (*turns[-1].texts, text), turns[-1].sent_at)
        else:
            turns.append(Turn(message["sender"], (text,), _time(message["timestamp"])))
    ratings = {
        name: number for name, value in data.get("ratings", {}).items() if (number := _number(value)) is not None
    }
    return Conversation(conversation_id, data.get("prompt"), tuple(turns), ratings)


def _time(text: str) -> datetime | None:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _number(value: Any) -> float | None:
    """A rating as a number; some are strings, some are not ratings at all."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
