"""How a conversation and its answer become a reward model's input: one function for training and for scoring.

The template is stored beside the weights as `ullim_reward.json`. A folder without that file (somebody else's reward
model) is rendered through its chat template where the tokenizer has one, else as a plain pair.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ullim.errors import BadInput
from ullim.records import Message

TEMPLATE_FILE = "ullim_reward.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RewardTemplate:
    """`pair`: the last `context_turns` turns as the first segment, the answer as the second. `chat`: the tokenizer's
    chat template over all turns and the answer. System messages belong to the policy and are left out of a pair."""

    style: Literal["pair", "chat"] = "pair"
    context_turns: int = 3
    separator: str = "\n"
    max_tokens: int | None = None  # what the model was trained with; None where unknown

    def save(self, folder: Path) -> None:
        """Write `ullim_reward.json` into a checkpoint folder."""
        text = json.dumps({"format": _FORMAT, **asdict(self)}, indent=2, ensure_ascii=False)
        (folder / TEMPLATE_FILE).write_text(text + "\n", encoding="utf-8")


def load_template(folder: Path, tokenizer: Any) -> RewardTemplate:
    """The template stored with a checkpoint, or the default for its tokenizer. BadInput where the file is wrong."""
    path = folder / TEMPLATE_FILE
    if not path.exists():
        return RewardTemplate(style="chat" if getattr(tokenizer, "chat_template", None) else "pair")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("format") != _FORMAT:
            raise ValueError(f"format is not {_FORMAT}")
        template = RewardTemplate(**data)
        if template.style not in ("pair", "chat") or template.context_turns < 0:
            raise ValueError('style must be "pair" or "chat" and context_turns at least 0')
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadInput(f"{path}: not a reward template ({error}); expected {RewardTemplate()}") from error
    return template


def render(
    template: RewardTemplate, messages: Sequence[Message], answer: str, tokenizer: Any, *, max_tokens: int
) -> dict[str, list[int]] | None:
    """The model's input for `answer`: `input_ids` [T] with T ≤ `max_tokens`, and whatever else the tokenizer makes
    ([T] each). None where the answer alone does not fit.

    What is too long loses its oldest part: tokens from the left of the context in a pair, whole turns in a chat
    (so that no turn is quoted without its role). The answer is never cut, as a cut answer is another answer.
    """
    if template.style == "chat":
        return _render_chat(messages, answer, tokenizer, max_tokens)
    turns = [message.content for message in messages if message.role != "system"]
    context = template.separator.join(turns[-template.context_turns :] if template.context_turns else [])
    room = max_tokens - tokenizer.num_special_tokens_to_add(pair=True) - len(_plain_ids(tokenizer, answer))
    if room < 0:
        return None
    tokenizer.truncation_side = "left"
    # As a batch of one: an empty answer given as a bare string would make the pair a single sequence.
    encoded = tokenizer([context if room else ""], [answer], truncation="only_first", max_length=max_tokens)
    return {key: list(values[0]) for key, values in encoded.items()}


def _render_chat(
    messages: Sequence[Message], answer: str, tokenizer: Any, max_tokens: int
) -> dict[str, list[int]] | None:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    first = 1 if turns and turns[0]["role"] == "system" else 0
    head, rest = turns[:first], turns[first:]
    # Templates may insist on a user turn first, so the conversation is only ever cut in front of one.
    starts = [i for i, turn in enumerate(rest) if turn["role"] == "user"] or [0]
    for start in starts:
        conversation = [*head, *rest[start:], {"role": "assistant", "content": answer}]
        ids = _plain_ids(tokenizer, tokenizer.apply_chat_template(conversation, tokenize=False))
        if len(ids) <= max_tokens:
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
    return None


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Ids of `text` without special tokens (a chat template writes its own)."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
