import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.records import Message
from ullim.rewards.evaluation import area_under_roc, auc_interval, evaluate_scores
from ullim.signals.examples import LabelledAnswer


def test_auc_by_hand() -> None:
    # Pairs (positive, negative): (3,1) won, (3,2) won, (2,1) won, (2,2) tied -> 3.5 of 4.
    assert area_under_roc([3, 2, 1, 2], [True, True, False, False]) == 0.875
    assert area_under_roc([1, 1, 1], [True, False, True]) == 0.5


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=2, max_size=30))
@settings(deadline=None, max_examples=50)
def test_auc_is_the_share_of_pairs_won(rows: list[tuple[int, bool]]) -> None:
    positive = [score for score, label in rows if label]
    negative = [score for score, label in rows if not label]
    if not positive or not negative:
        with pytest.raises(ValueError, match="both classes"):
            area_under_roc([score for score, _ in rows], [label for _, label in rows])
        return
    won = sum((p > n) + 0.5 * (p == n) for p in positive for n in negative)
    auc = area_under_roc([score for score, _ in rows], [label for _, label in rows])
    assert auc == pytest.approx(won / (len(positive) * len(negative)))


def test_auc_refuses_nan() -> None:
    with pytest.raises(ValueError, match="no NaN"):
        area_under_roc([float("nan"), 1.0], [True, False])


def test_interval_holds_the_auc_and_widens_when_answers_come_from_few_conversations() -> None:
    rng = np.random.default_rng(0)
    labels = (rng.random(200) < 0.5).tolist()
    scores = (rng.normal(size=200) + np.array(labels)).tolist()
    many = auc_interval(scores, labels, [str(i) for i in range(200)])
    few = auc_interval(scores, labels, [str(i // 25) for i in range(200)])
    assert many[0] < area_under_roc(scores, labels) < many[1]
    assert many == auc_interval(scores, labels, [str(i) for i in range(200)])
    repeated = auc_interval(scores * 4, labels * 4, [str(i) for i in range(200)] * 4)
    assert repeated == pytest.approx(many, abs=0.02)  # copies within a conversation tell nothing new
    assert few != many


def test_baselines_stand_beside_the_model() -> None:
    def example(answer: str, before: str, position: int, label: bool) -> LabelledAnswer:
        return LabelledAnswer(f"c{position}", (Message("user", before),), answer, label, position)

    examples = [example("long answer", "x", 1, True), example("no", "xx", 2, False), example("so", "x", 3, True)]
    report = evaluate_scores([0.9, 0.1, 0.8], examples)
    assert report["auc"] == 1.0
    assert report["auc_answer_length"] == 0.75
    assert report["auc_context_length"] == 0.0
    assert report["auc_position"] == 0.5
    assert (report["examples"], report["positive_share"]) == (3.0, pytest.approx(2 / 3))
