"""Reading the conversations to be answered, and turning them into token ids.

A prompts file is JSONL (one object a line) or Parquet, with a column `messages` (a list of role and content) and
optionally `id`. Other columns are ignored.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet

from ullim.errors import BadInput
from ullim.records import IntArray, Message

ROLES = ("system", "user", "assistant")
EncodedPrompt = tuple[str, tuple[Message, ...], IntArray]
"""Prompt id, messages, and token ids [P] with the chat template applied, ready to be continued."""

_SHOWN_MISTAKES = 10
_RIGHT = '{"messages": [{"role": "user", "content": "Hello!"}]}'


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """One line of a prompts file."""

    prompt_id: str
    messages: tuple[Message, ...]


def read_prompts(path: Path) -> list[RawPrompt]:
    """All prompts of `path` in file order; one without an `id` is called by its place, `line-3` or `row-3`.

    Raises BadInput naming the file and, for each of the first mistakes, the line or row, what was found and what is
    right. Nothing is skipped or repaired: a prompt that goes missing without a word is found out too late.
    """
    rows = {".jsonl": _json_lines, ".parquet": _parquet_rows}.get(path.suffix.lower())
    if rows is None:
        raise BadInput(f"{path}: a prompts file ends in .jsonl or .parquet")
    if not path.is_file():
        raise BadInput(f"{path}: no such file")
    prompts: list[RawPrompt] = []
    mistakes: list[str] = []
    seen: dict[str, str] = {}
    for place, row in rows(path):
        try:
            if isinstance(row, _Mistake):
                raise row
            prompt = _prompt(row, place)
            if prompt.prompt_id in seen:
                raise _Mistake(f"id {prompt.prompt_id!r} was already used in {seen[prompt.prompt_id]}")
        except _Mistake as mistake:
            mistakes.append(f"  {place}: {mistake}")
        else:
            seen[prompt.prompt_id] = place
            prompts.append(prompt)
    if mistakes:
        more = [f"  ... and {len(mistakes) - _SHOWN_MISTAKES} more"] if len(mistakes) > _SHOWN_MISTAKES else []
        raise BadInput("\n".join([f"{path}:", *mistakes[:_SHOWN_MISTAKES], *more]))
    if not prompts:
        raise BadInput(f"{path}: holds no prompts; write one object a line, such as {_RIGHT}")
    return prompts


def encode_prompts(
    prompts: Sequence[RawPrompt],
    tokenizer: Any,
    *,
    max_tokens: int,
    max_new_tokens: int,
    context: int,
) -> tuple[list[EncodedPrompt], dict[str, int]]:
    """Apply the tokenizer's chat template, open for the assistant's turn, and leave out what is too long.

    Args:
        max_tokens: longest prompt wanted, in tokens.
        max_new_tokens: longest answer; prompt and answer together must fit `context` tokens.

    Returns:
        The prompts that fit, in order, and how many were left out by reason (`longer than ...`).

    Raises:
        BadInput: no chat template, a template that refuses a prompt (named), or no prompt that fits.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput("the policy's tokenizer has no chat template; name one with policy.chat_template = FILE.jinja")
    limit, reason = max_tokens, f"longer than prompts.max_tokens ({max_tokens})"
    if context - max_new_tokens < max_tokens:
        limit = context - max_new_tokens
        reason = f"longer than the context ({context}) less sampling.max_new_tokens ({max_new_tokens})"
    encoded: list[EncodedPrompt] = []
    left_out: Counter[str] = Counter()
    shortest: int | None = None
    for prompt in prompts:
        ids = tokenizer(_templated(prompt, tokenizer), add_special_tokens=False, verbose=False)["input_ids"]
        shortest = len(ids) if shortest is None else min(shortest, len(ids))
        if len(ids) > limit:
            left_out[reason] += 1
        else:
            encoded.append((prompt.prompt_id, prompt.messages, np.asarray(ids, dtype=np.int32)))
    if not encoded:
        raise BadInput(f"all {len(prompts)} prompts are {reason}; the shortest has {shortest} tokens")
    return encoded, dict(left_out)


def _templated(prompt: RawPrompt, tokenizer: Any) -> str:
    messages = [{"role": message.role, "content": message.content} for message in prompt.messages]
    try:
        return cast(str, tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    except Exception as error:  # a template is code and may raise anything
        raise BadInput(f"prompt {prompt.prompt_id!r}: the chat template refuses it: {error}") from error


class _Mistake(Exception):
    """What is wrong with one line."""


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"line {number}", _json(line, first=number == 1)


def _json(line: bytes, *, first: bool) -> Any:
    """The line's value, or the _Mistake in it (returned: a generator that raises could not go on)."""
    try:
        return json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as error:
        return _Mistake(f"not UTF-8 ({error.reason} at byte {error.start})")
    except (ValueError, RecursionError) as error:
        return _Mistake(f"not JSON ({error}); write one object a line, such as {_RIGHT}")


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if "messages" not in names:
                raise BadInput(f"{path}: has no column `messages`; found {', '.join(names) or 'no columns'}")
            number = 0
            for batch in file.iter_batches(columns=[name for name in ("id", "messages") if name in names]):
                for row in batch.to_pylist():
                    number += 1
                    yield f"row {number}", row
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as Parquet: {error}") from error


def _prompt(row: Any, place: str) -> RawPrompt:
    if not isinstance(row, dict):
        raise _Mistake(f"found {_kind(row)}; expected an object such as {_RIGHT}")
    if row.get("messages") is None:
        raise _Mistake(f"has no `messages`; expected an object such as {_RIGHT}")
    messages = row["messages"]
    if not isinstance(messages, list):
        raise _Mistake(f"`messages` is {_kind(messages)}; expected a list of objects with role and content")
    if not messages:
        raise _Mistake("`messages` is empty; a prompt needs at least one message")
    turns = tuple(_message(message, number) for number, message in enumerate(messages, start=1))
    for number, turn in enumerate(turns[1:], start=2):
        if turn.role == "system":
            raise _Mistake(f"message {number} is from system; a system message can only be the first")
    if turns[-1].role == "assistant":
        raise _Mistake("the last message is from assistant; a prompt ends with the message to be answered")
    return RawPrompt(_identity(row.get("id"), place), turns)


def _identity(value: Any, place: str) -> str:
    if value is None:
        return place.replace(" ", "-")
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise _Mistake(f"`id` is {_kind(value)} {value!r}; expected a text or a whole number")
    return _clean(str(value), "`id`")


def _message(value: Any, number: int) -> Message:
    if not isinstance(value, dict):
        raise _Mistake(f"message {number} is {_kind(value)}; expected an object with role and content")
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise _Mistake(f"message {number} has role {role!r}; expected one of {', '.join(ROLES)}")
    if not isinstance(content, str):
        raise _Mistake(f"message {number} has content of type {_kind(content)}; expected a text")
    if not content.strip():
        raise _Mistake(f"message {number} has empty content")
    return Message(role, _clean(content, f"message {number}"))


def _clean(text: str, what: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise _Mistake(f"{what} holds half of a surrogate pair ({found}), which is no character") from error
    return text


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true/false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
