"""PromptStream: which prompt comes next, and which are finished for good.

The stream is an endless (or `epochs` long) sequence of positions 0, 1, 2, ...; position p shows prompt
`order(p // n)[p % n]` of the file. A position is *done* once its group was trained on or its prompt dropped.
The checkpoint keeps done positions only, so whatever was in flight or buffered is asked again after a resume:
no position is trained twice, none is skipped. A pure class.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ullim.records import Prompt
from ullim.signals.prompts import EncodedPrompt


class PromptStream:
    """Prompts in order of position; `retries` is how often a position may be given back before it is dropped."""

    def __init__(
        self, prompts: Sequence[EncodedPrompt], *, seed: int, shuffle: bool, epochs: int | None, retries: int
    ) -> None:
        if not prompts:
            raise ValueError("a prompt stream needs at least one prompt")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._end = None if epochs is None else epochs * len(prompts)
        self._retries = retries
        self._watermark = 0  # every position below it is done
        self._done: set[int] = set()  # done positions at or above the watermark
        self._cursor = 0  # next position never handed out
        self._returned: deque[int] = deque()
        self._tries: dict[int, int] = {}
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))

    @property
    def exhausted(self) -> bool:
        """Nothing left to hand out now (what is in flight may still be given back)."""
        return not self._returned and self._next_new() is None

    def next(self) -> Prompt | None:
        """The next prompt, given-back ones first; None at the end of the last epoch."""
        if self._returned:
            return self._at(self._returned.popleft())
        position = self._next_new()
        if position is None:
            return None
        self._cursor = position + 1
        return self._at(position)

    def give_back(self, prompt: Prompt) -> bool:
        """Ask again later. False once its retries are used up: then the caller drops it with `done`."""
        tries = self._tries.get(prompt.position, 0) + 1
        if tries > self._retries:
            return False
        self._tries[prompt.position] = tries
        self._returned.append(prompt.position)
        return True

    def tries(self, prompt: Prompt) -> int:
        """How often this position has been given back; part of the sampling seed, so a retry draws anew."""
        return self._tries.get(prompt.position, 0)

    def done(self, prompt: Prompt) -> None:
        """Trained or dropped: never again."""
        position = prompt.position
        if self._is_done(position):
            raise RuntimeError(f"prompt position {position} was finished twice")
        self._tries.pop(position, None)
        self._done.add(position)
        while self._watermark in self._done:
            self._done.remove(self._watermark)
            self._watermark += 1

    def state(self) -> dict[str, Any]:
        return {
            "watermark": self._watermark,
            "done": sorted(self._done),
            "tries": {str(position): tries for position, tries in self._tries.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue after `state`: everything not done is handed out again, in order of position."""
        self._watermark = int(state["watermark"])
        self._done = {int(position) for position in state["done"]}
        self._tries = {int(position): int(tries) for position, tries in state["tries"].items()}
        self._cursor = self._watermark
        self._returned.clear()

    def _is_done(self, position: int) -> bool:
        return position < self._watermark or position in self._done

    def _next_new(self) -> int | None:
        position = self._cursor
        while self._is_done(position):
            position += 1
        return None if self._end is not None and position >= self._end else position

    def _at(self, position: int) -> Prompt:
        epoch, place = divmod(position, len(self._prompts))
        if self._shuffle:
            if self._order[0] != epoch:
                self._order = (epoch, np.random.default_rng((self._seed, epoch)).permutation(len(self._prompts)))
            place = int(self._order[1][place])
        prompt_id, messages, token_ids = self._prompts[place]
        return Prompt(prompt_id=prompt_id, position=position, messages=messages, token_ids=token_ids)
