"""What a reward channel is: something that says a number, or why there is none, for each answer of a group."""

from collections.abc import Sequence
from typing import Protocol

from ullim.records import Completion, Prompt, Score


class RewardChannel(Protocol):
    """One named reward. Lives on the inference node, beside the engine, for as long as the node does.

    `score` may be called for several groups at once; a channel that gains from larger batches joins them
    itself. It returns one Score per completion, in order. A failure that concerns single answers is a Score
    with a reason; what it raises is a bug or a set-up error and ends the run.
    """

    @property
    def name(self) -> str: ...

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]: ...

    async def close(self) -> None: ...
