"""Bad steps: counted, forgiven by a good one, fatal in a row."""

import json

import numpy as np
import pytest

from ullim.errors import RunFailed
from ullim.learner.bad_steps import BadSteps
from ullim.learner.step import StepOutcome
from ullim.records import LearnerBatch, Sequence

IDS = np.array([1, 2], np.int32)
BATCH = LearnerBatch(7, tuple(Sequence(IDS, IDS, np.array([-1, np.nan], np.float32), a, 0, IDS) for a in (0.5, 1.5)))


def outcome(bad: bool, suspects: tuple[int, ...] = ()) -> StepOutcome:
    logprobs = (np.array([-1, -np.inf], np.float32),) * 2
    return StepOutcome({}, 0, ("update 1 of 1: loss nan, gradient norm nan",) if bad else (), suspects, logprobs)


def test_a_good_step_forgives(tmp_path):
    steps = BadSteps(2, tmp_path / "bad.jsonl")
    for bad in (True, False, True, False):
        steps.judge(BATCH, outcome(bad), write=True)
    assert steps.total == 2
    assert steps.in_a_row == 0
    assert not (tmp_path / "bad.jsonl").exists()


@pytest.mark.parametrize(("suspects", "places"), [((1,), [1]), ((), [0, 1])])
def test_the_limit_stops_the_run_with_evidence(tmp_path, suspects, places):
    path = tmp_path / "deeper" / "bad.jsonl"
    steps = BadSteps(2, path)
    steps.judge(BATCH, outcome(True, suspects), write=True)
    with pytest.raises(RunFailed, match=r"2 steps in a row.*loss nan.*bad\.jsonl"):
        steps.judge(BATCH, outcome(True, suspects), write=True)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["sequence"] for line in lines] == places
    assert lines[0]["rollout_logprobs"] == [-1.0, "nan"]
    assert lines[0]["learner_logprobs"] == [-1.0, "-inf"]
    assert lines[0]["version"] == 7


def test_other_ranks_stop_too_and_write_nothing(tmp_path):
    steps = BadSteps(1, tmp_path / "bad.jsonl")
    with pytest.raises(RunFailed):
        steps.judge(BATCH, outcome(True), write=False)
    assert not (tmp_path / "bad.jsonl").exists()
