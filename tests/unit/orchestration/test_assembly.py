"""Scores to advantages to sequences, with numbers worked out by hand."""

import math

import numpy as np
import pytest

from ullim.config.objective import AdvantageConfig
from ullim.orchestration.assembly import assemble
from ullim.records import Completion, FinishReason, Message, Prompt, RolloutGroup, Score

DECOUPLED = AdvantageConfig(kind="decoupled", batch_normalize=False)
SUMMED = AdvantageConfig(kind="summed")


def answer(finish: FinishReason = "stop", **scores: float | None) -> Completion:
    return Completion(
        token_ids=np.array([7, 8, 9], dtype=np.int32),
        logprobs=np.array([-0.1, -0.2, -0.3], dtype=np.float32),
        versions=np.array([4, 4, 5], dtype=np.int32),
        finish=finish,
        text="x",
        scores={n: Score(None, "timed out") if v is None else Score(v) for n, v in scores.items()},
    )


def group(ticket: int, *completions: Completion) -> RolloutGroup:
    prompt = Prompt(f"p{ticket}", ticket, (Message("user", "hi"),), np.array([1, 2], dtype=np.int32))
    return RolloutGroup(ticket, prompt, completions, "node-0")


def test_one_channel_by_hand() -> None:
    # Rewards 0 and 1: mean 1/2, sample std sqrt(1/2).
    made = assemble([group(3, answer(a=0.0), answer(a=1.0))], version=5, weights={"a": 1.0}, settings=SUMMED)
    expected = 0.5 / (math.sqrt(0.5) + 1e-4)
    assert made.advantages == pytest.approx({(3, 0): -expected, (3, 1): expected}, rel=1e-5)
    assert made.members == ((3, 0), (3, 1))
    first = made.batch.sequences[0]
    assert first.prompt_ids.tolist() == [1, 2]
    assert first.token_ids.tolist() == [7, 8, 9]
    assert first.group == 3
    assert made.batch.version == 5
    assert made.batch.tokens == 6
    assert not made.teaches_nothing


def test_decoupled_channels_have_equal_say_whatever_their_scales() -> None:
    # Channel b says the opposite of a on a scale a thousand times as large: they cancel after normalisation.
    groups = [group(0, answer(a=0.0, b=1000.0), answer(a=1.0, b=0.0))]
    weights = {"a": 1.0, "b": 1.0}
    decoupled = assemble(groups, version=0, weights=weights, settings=DECOUPLED)
    assert decoupled.advantages[0, 0] == pytest.approx(0.0, abs=1e-3)
    assert decoupled.shares["advantage/a/share"] == pytest.approx(0.5, abs=1e-3)
    summed = assemble(groups, version=0, weights=weights, settings=SUMMED)
    assert summed.advantages[0, 0] > 0.7  # b alone decides
    assert summed.shares["advantage/b/share"] == pytest.approx(1000 / 1001, rel=1e-4)


def test_a_member_without_one_weighted_score_leaves_statistics_and_loss() -> None:
    made = assemble(
        [group(0, answer(a=0.0, b=0.0), answer(a=9.0, b=None), answer(a=1.0, b=0.0))],
        version=0,
        weights={"a": 1.0, "b": 1.0},
        settings=DECOUPLED,
    )
    assert made.members == ((0, 0), (0, 2))
    assert made.advantages[0, 2] == pytest.approx(0.5 / (math.sqrt(0.5) + 1e-4), rel=1e-5)
    assert made.unscored == {"b: timed out": 1}


def test_a_channel_of_weight_zero_is_not_needed() -> None:
    made = assemble(
        [group(0, answer(a=0.0, b=None), answer(a=1.0, b=None))],
        version=0,
        weights={"a": 1.0, "b": 0.0},
        settings=DECOUPLED,
    )
    assert len(made.members) == 2
    assert not made.unscored


def test_aborted_members_leave_and_are_counted() -> None:
    made = assemble(
        [group(0, answer(a=0.0), answer("aborted", a=5.0), answer(a=1.0))],
        version=0,
        weights={"a": 1.0},
        settings=SUMMED,
    )
    assert made.members == ((0, 0), (0, 2))
    assert made.unscored == {"aborted": 1}


def test_flat_groups_teach_nothing() -> None:
    made = assemble(
        [group(0, answer(a=1.0), answer(a=1.0)), group(1, answer(a=2.0), answer(a=2.0))],
        version=0,
        weights={"a": 1.0},
        settings=DECOUPLED,
    )
    assert made.teaches_nothing
    assert len(made.batch.sequences) == 4


def test_nothing_scored_gives_an_empty_batch() -> None:
    made = assemble([group(0, answer(a=None), answer(a=None))], version=0, weights={"a": 1.0}, settings=DECOUPLED)
    assert made.batch.sequences == ()
    assert made.teaches_nothing
    assert made.unscored == {"a: timed out": 2}
