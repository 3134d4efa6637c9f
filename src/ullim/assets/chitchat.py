"""`builtin:chitchat` and `builtin:chitchat-heldout`: turns of real conversations (chitchat-dataset, MIT) to answer.

Conversations are divided by a hash of their id into four parts that never share one: two for the reward model (fit,
measure) and two for prompts (train, held out). So no prompt comes from a conversation the reward model has seen.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from ullim.records import Message
from ullim.signals.chitchat import Conversation, read_conversations
from ullim.signals.kept_talking import as_messages
from ullim.signals.split import hash_fraction

REVISION = "0.9.0-1"
TRAIN_FILE = "train.jsonl"
HELDOUT_FILE = "heldout.jsonl"

# Part of the conversations, as stretches of hash_fraction(conversation_id).
REWARD_FIT = (0.0, 0.5)
REWARD_MEASURE = (0.5, 0.6)
PROMPTS_TRAIN = (0.6, 0.93)
PROMPTS_HELDOUT = (0.93, 1.0)

_PROMPTS_PER_CONVERSATION = 3
_TURNS = 3
_CHARACTERS = 320  # with the system line and SmolLM2's template about 150 tokens at most

_CARD = """Prompts from chitchat-dataset 0.9.0 (MIT licence): turns of conversations between two people, 2018.
train.jsonl and heldout.jsonl share no conversation with each other or with the built-in reward model.
"""


def part(conversations: Iterable[Conversation], stretch: tuple[float, float]) -> list[Conversation]:
    """The conversations whose id falls into `stretch`, in their order."""
    low, high = stretch
    return [c for c in conversations if low <= hash_fraction(c.conversation_id) < high]


def build_prompts(folder: Path, progress: Callable[[str, float], None]) -> None:
    """Write `train.jsonl` and `heldout.jsonl` (`id`, `messages`) into `folder`."""
    progress("reading human conversations", 0.0)
    conversations = read_conversations()
    for file, stretch in ((TRAIN_FILE, PROMPTS_TRAIN), (HELDOUT_FILE, PROMPTS_HELDOUT)):
        lines = [_line(prompt) for c in part(conversations, stretch) for prompt in prompts_of(c)]
        random.Random(file).shuffle(lines)  # neighbours should not be of one conversation
        (folder / file).write_text("".join(lines), encoding="utf-8")
    (folder / "README.md").write_text(_CARD, encoding="utf-8")
    progress("prompts are ready", 1.0)


def prompts_of(conversation: Conversation) -> Iterator[tuple[str, tuple[Message, ...]]]:
    """Up to three prompts (id, messages): a system line with the topic, then one or three turns ending with the
    user's. Only turns that were answered are used, and only where they are short."""
    rng = random.Random(conversation.conversation_id)
    places = range(len(conversation.turns) - 1)
    chosen = 0
    for place in rng.sample(places, len(places)):
        messages = _recent(conversation, place)
        if messages:
            yield f"{conversation.conversation_id}:{place}", (_system(conversation.topic), *messages)
            chosen += 1
        if chosen == _PROMPTS_PER_CONVERSATION:
            return


def _recent(conversation: Conversation, place: int) -> Sequence[Message]:
    """The turn at `place` and, where they fit, the two before it. Odd numbers only, so that the user begins: many
    chat templates insist on it."""
    for count in range(_TURNS, 0, -2):
        first = place - count + 1
        turns = conversation.turns[max(0, first) : place + 1]
        if first >= 0 and sum(len(turn.text) for turn in turns) <= _CHARACTERS:
            return as_messages(turns)
    return ()


def _system(topic: str | None) -> Message:
    line = "You are chatting with someone you have just met. Reply in one or two short, friendly sentences."
    return Message("system", f"{line} Topic: {topic}" if topic else line)


def _line(prompt: tuple[str, tuple[Message, ...]]) -> str:
    prompt_id, messages = prompt
    turns = [{"role": message.role, "content": message.content} for message in messages]
    return json.dumps({"id": prompt_id, "messages": turns}, ensure_ascii=False) + "\n"
