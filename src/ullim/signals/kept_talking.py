"""The signal "did the partner keep talking", read from logs of two people.

An answer is a turn that follows the other person's. It is positive where the partner wrote at least
`PARTNER_TURNS` more turns after it, negative where it was the last turn of the conversation. What lies between (one
more turn, often just "bye") is neither, and left out.

Three traps, and what is done about them:

- *Censoring.* A log that stops has not necessarily ended. Only conversations known to have ended are used, for
  positives too: taking positives alone from the others would teach how their kind of conversation looks.
- *Position.* How many turns are still to come depends on how many there were; the place of an answer alone
  predicts the outcome (AUC 0.67 for "at least 6 more turns"). Every negative is matched with a positive from
  another conversation at the same place, so that place says nothing.
- *Long conversations.* They hold most turns and few endings. At most `POSITIVES_PER_CONVERSATION` come from one.
"""

import random
from collections import defaultdict
from collections.abc import Sequence

from ullim.records import Message
from ullim.signals.chitchat import Conversation, Turn
from ullim.signals.examples import LabelledAnswer

PARTNER_TURNS = 2
POSITIVES_PER_CONVERSATION = 2

_EXACT_PLACES = 16
_BAND = 8


def kept_talking_examples(
    conversations: Sequence[Conversation], *, pairs: int, context_turns: int, seed: int
) -> list[LabelledAnswer]:
    """Up to `pairs` negatives, each followed by its matched positive, in an order and choice fixed by `seed`.

    Fewer where no partner at the same place is left. Each example carries at most `context_turns` turns before it.
    """
    rng = random.Random(seed)
    ended = [c for c in conversations if c.ended and len(c.turns) >= 2]
    positives: dict[int, list[tuple[Conversation, int]]] = defaultdict(list)
    for conversation in ended:
        # An answer at place i with r turns after it has seen the partner write (r + 1) // 2 more turns.
        places = range(1, len(conversation.turns) - (2 * PARTNER_TURNS - 1))
        for place in rng.sample(places, min(POSITIVES_PER_CONVERSATION, len(places))):
            positives[_band(place)].append((conversation, place))
    for candidates in positives.values():
        rng.shuffle(candidates)
    rng.shuffle(ended)
    examples: list[LabelledAnswer] = []
    for negative in ended:
        if len(examples) >= 2 * pairs:
            break
        place = len(negative.turns) - 1
        candidates = positives[_band(place)]
        chosen = next((i for i, (c, _) in enumerate(candidates) if c is not negative), None)
        if chosen is not None:
            positive, positive_place = candidates.pop(chosen)
            examples.append(_example(negative, place, label=False, context_turns=context_turns))
            examples.append(_example(positive, positive_place, label=True, context_turns=context_turns))
    return examples


def _band(place: int) -> int:
    """Places are matched exactly at first, later in bands of 8, as late ones are rare."""
    return place if place < _EXACT_PLACES else _EXACT_PLACES + (place - _EXACT_PLACES) // _BAND


def _example(conversation: Conversation, place: int, *, label: bool, context_turns: int) -> LabelledAnswer:
    turns = conversation.turns
    return LabelledAnswer(
        conversation_id=conversation.conversation_id,
        messages=as_messages(turns[max(0, place - context_turns) : place]),
        answer=turns[place].text,
        label=label,
        position=place,
    )


def as_messages(turns: Sequence[Turn]) -> tuple[Message, ...]:
    """Alternating turns as messages; the last is the user's, as whoever answers next is the assistant."""
    roles = ("user", "assistant")
    return tuple(Message(roles[(len(turns) - 1 - i) % 2], turn.text) for i, turn in enumerate(turns))  # type: ignore[arg-type]
