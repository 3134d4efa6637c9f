"""Steps whose loss or gradient was not finite: counted, tolerated a few times in a row, then evidence is written."""

import json
import math
from pathlib import Path

from ullim.errors import RunFailed
from ullim.learner.step import StepOutcome
from ullim.records import FloatArray, LearnerBatch


class BadSteps:
    """Counts bad steps; the same on every rank, so all ranks stop together. `path` is a JSON-lines file."""

    def __init__(self, limit: int, path: Path) -> None:
        self._limit, self._path = limit, path
        self.in_a_row = 0
        self.total = 0

    def judge(self, batch: LearnerBatch, outcome: StepOutcome, *, write: bool) -> None:
        """Count this step. RunFailed at the limit, after the offending samples were written (where `write`)."""
        if not outcome.bad:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.total += 1
        if self.in_a_row < self._limit:
            return
        if write:
            self._write(batch, outcome)
        raise RunFailed(
            f"{self.in_a_row} steps in a row had a non-finite loss or gradient (max_bad_steps = {self._limit}). "
            f"The last: {'; '.join(outcome.bad)}. Its samples are in {self._path}: look there for broken advantages "
            "or log-probs; if there are none, lower learner.learning_rate"
        )

    def _write(self, batch: LearnerBatch, outcome: StepOutcome) -> None:
        """One line per suspect sequence, or per sequence of the batch where only the gradient was not finite."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        places = outcome.suspects or range(len(batch.sequences))
        with self._path.open("w", encoding="utf-8") as file:
            for place in places:
                sequence = batch.sequences[place]
                line = {
                    "version": batch.version,
                    "sequence": place,
                    "group": sequence.group,
                    "advantage": _number(sequence.advantage),
                    "prompt_ids": sequence.prompt_ids.tolist(),
                    "token_ids": sequence.token_ids.tolist(),
                    "rollout_logprobs": _numbers(sequence.rollout_logprobs),
                    "learner_logprobs": _numbers(outcome.logprobs[place]),
                    "versions": sequence.versions.tolist(),
                }
                file.write(json.dumps(line, allow_nan=False) + "\n")


def _number(value: float) -> float | str:
    return float(value) if math.isfinite(value) else str(value)


def _numbers(values: FloatArray) -> list[float | str]:
    return [_number(value) for value in values.tolist()]
