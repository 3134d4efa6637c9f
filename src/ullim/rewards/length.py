"""Length rewards: the continuous one, and the two it is compared with.

Length in tokens is what was sampled, the stop token included (the learner's length); in characters it is the
reader's count of `ullim.text.length`. An aborted answer has no length of its own and stays unscored. One cut at
the token limit is scored at the length it has.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from ullim.objective.losses import overlong_penalty
from ullim.records import Completion, Prompt, Score
from ullim.text.length import count_characters

LengthUnit = Literal["tokens", "characters"]


def length_reward(length: float, *, target: float, width_short: float, width_long: float) -> float:
    """exp(−½ ((length − target) / width)²), where width is `width_short` below the target and `width_long` above.

    1 at the target, exp(−½) ≈ 0.61 one width away, in [0, 1] everywhere and never NaN. Unlike a 0/1 limit it has
    a slope wherever answers are, so members of a group rarely tie. All arguments in one unit; target and widths > 0.
    """
    if not (target > 0 and width_short > 0 and width_long > 0):
        raise ValueError(f"need target, width_short and width_long > 0, got {target}, {width_short}, {width_long}")
    deviation = (length - target) / (width_short if length < target else width_long)
    # Products, not powers: a float power raises OverflowError where a product becomes inf and exp(−inf) is 0.
    return math.exp(-0.5 * deviation * deviation)


def binary_length_reward(length: float, *, limit: float) -> float:
    """1 where length ≤ limit, else 0 (the length reward of the GDPO paper)."""
    return 1.0 if length <= limit else 0.0


class LengthChannel:
    """A channel that looks at each answer's length alone. Build it with one of the three functions below."""

    def __init__(self, name: str, unit: LengthUnit, rule: Callable[[float], float]) -> None:
        self.name = name
        self._unit: LengthUnit = unit
        self._rule = rule

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        return [self._score(completion) for completion in completions]

    async def close(self) -> None:
        """Nothing to free."""

    def _score(self, completion: Completion) -> Score:
        if completion.finish == "aborted":
            return Score(None, "aborted before its end")
        length = len(completion.token_ids) if self._unit == "tokens" else count_characters(completion.text)
        return Score(self._rule(float(length)))


def continuous_channel(
    name: str, *, target: float, width_short: float, width_long: float, unit: LengthUnit
) -> LengthChannel:
    """The channel of `length_reward`."""
    return LengthChannel(
        name,
        unit,
        lambda length: length_reward(length, target=target, width_short=width_short, width_long=width_long),
    )


def binary_channel(name: str, *, limit: float, unit: LengthUnit) -> LengthChannel:
    """The channel of `binary_length_reward`."""
    return LengthChannel(name, unit, lambda length: binary_length_reward(length, limit=limit))


def overlong_channel(name: str, *, limit: int, buffer: int) -> LengthChannel:
    """The channel of DAPO's soft overlong penalty (`ullim.objective.losses.overlong_penalty`), in tokens."""
    return LengthChannel(
        name,
        "tokens",
        lambda length: float(overlong_penalty(torch.tensor([int(length)]), limit=limit, buffer=buffer)[0]),
    )
