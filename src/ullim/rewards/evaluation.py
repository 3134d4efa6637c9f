"""How good a reward model is on answers it has not seen, beside what no model is needed for."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ullim.signals.examples import LabelledAnswer

FloatVector = npt.NDArray[np.float64]


def area_under_roc(scores: Sequence[float] | FloatVector, labels: Sequence[bool]) -> float:
    """P(score of a positive > score of a negative) + ½ P(tie): the Mann-Whitney statistic over n₁·n₀.

    ValueError where one class is absent or a score is NaN, as the number would mean nothing.
    """
    values, positive = np.asarray(scores, np.float64), np.asarray(labels, bool)
    count = int(positive.sum())
    if not 0 < count < len(positive) or np.isnan(values).any():
        raise ValueError(f"AUC needs both classes and no NaN, got {count} positives among {len(positive)}")
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    midranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]
    return float((midranks[positive].sum() - count * (count + 1) / 2) / (count * (len(positive) - count)))


def auc_interval(
    scores: Sequence[float], labels: Sequence[bool], conversations: Sequence[str], *, seed: int = 0, draws: int = 500
) -> tuple[float, float]:
    """95 % bootstrap interval of the AUC. Whole conversations are drawn, as answers of one are not independent."""
    values, positive = np.asarray(scores, np.float64), np.asarray(labels, bool)
    _, owner = np.unique(np.asarray(conversations), return_inverse=True)
    members = [np.flatnonzero(owner == i) for i in range(int(owner.max()) + 1)]
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(draws):
        chosen = np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))])
        if 0 < positive[chosen].sum() < len(chosen):
            drawn.append(area_under_roc(values[chosen], positive[chosen].tolist()))
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(low), float(high)


def evaluate_scores(scores: Sequence[float], examples: Sequence[LabelledAnswer]) -> dict[str, float]:
    """AUC of `scores` with its interval, and of three baselines that need no model: the answer's length in
    characters (below ½ where shorter answers win), that of the turn before it, and the place in the conversation."""
    labels = [example.label for example in examples]
    low, high = auc_interval(scores, labels, [example.conversation_id for example in examples])
    return {
        "examples": float(len(examples)),
        "positive_share": float(np.mean(labels)),
        "auc": area_under_roc(scores, labels),
        "auc_low": low,
        "auc_high": high,
        "auc_answer_length": area_under_roc([float(len(e.answer)) for e in examples], labels),
        "auc_context_length": area_under_roc([float(len(e.messages[-1].content)) for e in examples], labels),
        "auc_position": area_under_roc([float(e.position) for e in examples], labels),
    }
