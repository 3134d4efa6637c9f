"""The noun between labels and reward models."""

from dataclasses import dataclass

from ullim.records import Message


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """One answer in its conversation, and whether the user signal followed it."""

    conversation_id: str
    messages: tuple[Message, ...]  # the turns before the answer, oldest first, ending with the other speaker's
    answer: str
    label: bool
    position: int  # the answer's place among the conversation's turns, from 0
