"""When an answer ends by itself: a stop token, or a stop string in the decoded text."""

from collections.abc import Sequence
from typing import Any, Protocol


class Decoder(Protocol):
    """The one tokenizer method that stop strings need."""

    def decode(self, token_ids: Sequence[int], **kwargs: Any) -> str: ...


class StopRule:
    """Stop tokens and stop strings of one request.

    Only the tail that could hold a stop string ending in the newest token is decoded. A token stands for at least
    one byte, so a string of b bytes ends within b tokens; four more cover a character cut at the tail's start
    and tokenizers that drop a leading space.
    """

    def __init__(self, token_ids: Sequence[int], strings: Sequence[str], decoder: Decoder | None) -> None:
        self._token_ids = frozenset(token_ids)
        self._strings = tuple(strings)
        self._decoder = decoder
        self._window = 4 + max((len(s.encode()) for s in strings), default=0)

    def reached(self, tokens: Sequence[int]) -> bool:
        """Whether the answer `tokens`, checked after each token, ends with its newest one."""
        if tokens[-1] in self._token_ids:
            return True
        if not self._strings or self._decoder is None:
            return False
        text = self._decoder.decode(list(tokens[-self._window :]), skip_special_tokens=False)
        return any(string in text for string in self._strings)
