"""The nouns refuse to hold what they cannot mean."""

import numpy as np
import pytest

from ullim.records import Completion, LearnerBatch, Message, Prompt, RolloutGroup, Score, Sequence


def completion(*versions: int) -> Completion:
    length = len(versions)
    return Completion(
        token_ids=np.arange(length, dtype=np.int32),
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.array(versions, dtype=np.int32),
        finish="stop",
        text="",
    )


def group(*completions: Completion) -> RolloutGroup:
    prompt = Prompt("p", 0, (Message("user", "hi"),), np.array([1], dtype=np.int32))
    return RolloutGroup(0, prompt, completions, "node-0")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_score_is_a_finite_number(value: float) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        Score(value)


def test_a_score_has_a_value_or_a_reason_and_never_both_or_neither() -> None:
    assert Score(0.0).reason is None
    assert Score(None, "timed out").value is None
    with pytest.raises(ValueError, match="either a value or a reason"):
        Score(None)
    with pytest.raises(ValueError, match="either a value or a reason"):
        Score(1.0, "timed out")


@pytest.mark.parametrize("short", ["token_ids", "logprobs", "versions"])
def test_every_token_has_a_log_prob_and_a_version(short: str) -> None:
    arrays = {
        "token_ids": np.zeros(3, dtype=np.int32),
        "logprobs": np.zeros(3, dtype=np.float32),
        "versions": np.zeros(3, dtype=np.int32),
    }
    arrays[short] = arrays[short][:2]
    lengths = ", ".join("2" if name == short else "3" for name in arrays)
    with pytest.raises(ValueError, match=f"must have one length, got {lengths}"):
        Completion(**arrays, finish="stop", text="")  # type: ignore[arg-type]


def test_lag_counts_from_the_oldest_token() -> None:
    assert completion(3, 3, 4).oldest_version == 3
    assert group(completion(3, 4), completion(), completion(2, 5)).oldest_version == 2


def test_nothing_generated_has_no_version() -> None:
    with pytest.raises(ValueError, match="zero-size"):
        _ = completion().oldest_version
    assert group().oldest_version is None
    assert group(completion(), completion()).oldest_version is None


def test_scores_are_added_to_a_copy() -> None:
    plain = completion(1)
    given = {"taste": Score(0.5)}
    scored = plain.with_scores(given)
    given.clear()
    assert scored.scores == {"taste": Score(0.5)}
    assert plain.scores == {}
    assert scored.token_ids is plain.token_ids


def test_a_batch_counts_completion_tokens_only() -> None:
    sequences = tuple(
        Sequence(
            prompt_ids=np.zeros(7, dtype=np.int32),
            token_ids=np.zeros(length, dtype=np.int32),
            rollout_logprobs=np.zeros(length, dtype=np.float32),
            advantage=0.0,
            group=0,
            versions=np.zeros(length, dtype=np.int32),
        )
        for length in (1, 4)
    )
    assert LearnerBatch(version=3, sequences=sequences).tokens == 5
    assert LearnerBatch(version=3, sequences=()).tokens == 0
