"""The nouns that cross rooms.

Everything here is frozen, holds numpy arrays (so that Ray ships it without copying and no room needs torch
to read it) and says its shapes. P is a prompt's length in tokens, L a completion's, N the number of
completions in a step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation, in the form that chat templates take."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A conversation to be answered.

    `position` is its place in the prompt stream of the run (0, 1, 2, ...): the identity that the gate, the
    checkpoint and the samples use. Two epochs over one file give one `prompt_id` two positions.
    """

    prompt_id: str
    position: int
    messages: tuple[Message, ...]
    token_ids: IntArray  # [P], the chat template applied, ready to be continued


@dataclass(frozen=True, slots=True)
class Score:
    """What one reward channel says of one completion: a finite number, or no number and the reason why."""

    value: float | None
    reason: str | None = None

    def __post_init__(self) -> None:
        if (self.value is None) == (self.reason is None):
            raise ValueError("a Score has either a value or a reason for having none")
        if self.value is not None and not np.isfinite(self.value):
            raise ValueError(f"a Score's value must be finite, got {self.value}; use reason= for a missing score")


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer. Token ids are the engine's own; `text` is for rewards and people only.

    `logprobs[i]` is ln of the probability with which token i was drawn (after temperature); `versions[i]` is
    the policy version whose weights produced it. A stop token that was sampled is part of `token_ids`;
    `text` is without it.
    """

    token_ids: IntArray  # [L]
    logprobs: FloatArray  # [L]
    versions: IntArray  # [L]
    finish: FinishReason
    text: str
    scores: Mapping[str, Score] = field(default_factory=dict)  # by channel name

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"token_ids, logprobs and versions must have one length, got "
                f"{len(self.token_ids)}, {len(self.logprobs)}, {len(self.versions)}"
            )

    def with_scores(self, scores: Mapping[str, Score]) -> "Completion":
        """The same completion carrying `scores`."""
        return replace(self, scores=dict(scores))

    @property
    def oldest_version(self) -> int:
        """The version that lag is counted from; an empty completion has none and raises ValueError."""
        return int(self.versions.min())


@dataclass(frozen=True, slots=True)
class RolloutTiming:
    """Seconds that a group spent in each place on its node, wall clock."""

    queued_s: float = 0.0
    generate_s: float = 0.0
    score_s: float = 0.0


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """All completions of one prompt, scored on the node that generated them.

    `ticket` is the number that the gate gave the group at admission. `completions` has the members that were
    generated to an end; a member whose generation failed is absent, and nothing identifies members by place.
    """

    ticket: int
    prompt: Prompt
    completions: tuple[Completion, ...]
    node: str
    timing: RolloutTiming = RolloutTiming()

    @property
    def oldest_version(self) -> int | None:
        """Oldest token version in the group, None where no member has a token."""
        return min((c.oldest_version for c in self.completions if len(c.token_ids)), default=None)


@dataclass(frozen=True, slots=True)
class Sequence:
    """One completion as the learner takes it: its prompt, its tokens and one advantage."""

    prompt_ids: IntArray  # [P]
    token_ids: IntArray  # [L], L >= 1
    rollout_logprobs: FloatArray  # [L], NaN where the engine gave none
    advantage: float
    group: int  # sequences of one group share a prompt, so that packing may hold it once
    versions: IntArray  # [L]


@dataclass(frozen=True, slots=True)
class LearnerBatch:
    """What all ranks together consume in one version step.

    Aggregation denominators are those of the whole step, fixed before anything is cut: `tokens` is the
    number of completion tokens and `len(sequences)` the number of sequences.
    """

    version: int  # learner version at which the batch was assembled; the step makes version + 1
    sequences: tuple[Sequence, ...]

    @property
    def tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the learner says after one version step.

    `metrics` are already reduced over micro-batches and ranks with their counts; `skipped` names why the
    optimiser did not move (non-finite loss or gradient), in which case the version still rises and the
    weights are those of before. `sequence_logprobs` are the learner's log-probs at the start of the batch, aligned with
    `LearnerBatch.sequences`, for the sample recorder.
    """

    version: int
    metrics: Mapping[str, float]
    seconds: float
    skipped: str | None = None
    sequence_logprobs: tuple[FloatArray, ...] = ()
