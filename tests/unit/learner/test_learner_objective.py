"""The recipe's objective as the pure functions take it, and its denominators."""

import numpy as np
import pytest
import torch

from ullim.config.objective import CorrectionConfig, ExplorationConfig, ObjectiveConfig
from ullim.learner.objective import choose_tokens, denominator, loss_settings
from ullim.objective.policy_loss import LossSettings
from ullim.records import Sequence


def sequence(tokens: int) -> Sequence:
    ids = np.zeros(tokens, np.int32)
    return Sequence(ids, ids, np.zeros(tokens, np.float32), 0.0, 0, ids)


def test_every_setting_arrives():
    recipe = ObjectiveConfig(
        ratio="sequence",
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3.0,
        aggregation="constant",
        kl_kind="k2",
        kl_coefficient=0.05,
        correction=CorrectionConfig(mode="mask", level="geometric", cap=1.5, floor=0.5),
        exploration=ExplorationConfig(kind="kl_cov", entropy_bonus=0.01, kl_coefficient=2.0),
    )
    assert loss_settings(recipe) == LossSettings(
        ratio_level="sequence",
        clip_low=0.1,
        clip_high=0.3,
        dual_clip=3.0,
        anchor="old",
        correction="mask",
        correction_level="geometric",
        correction_cap=1.5,
        correction_floor=0.5,
        aggregation="constant",
        kl_kind="k2",
        kl_coefficient=0.05,
        entropy_coefficient=0.01,
        exploration="kl_cov",
        kl_cov_coefficient=2.0,
    )


def test_the_anchor_of_the_ablation():
    recipe = ObjectiveConfig(correction=CorrectionConfig(mode="none", anchor="rollout"))
    assert loss_settings(recipe).anchor == "rollout"


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token-mean", 9.0), ("sequence-mean", 3.0), ("constant", 3.0 * 7)]
)
def test_denominators_by_hand(aggregation, expected):
    sequences = [sequence(2), sequence(3), sequence(4)]
    assert denominator(sequences, LossSettings(aggregation=aggregation), max_new_tokens=7) == expected


def test_kl_cov_takes_the_tokens_of_largest_covariance_of_the_whole_update():
    recipe = ObjectiveConfig(exploration=ExplorationConfig(kind="kl_cov", fraction=0.4))
    logp = [torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-4.0, -5.0])]
    chosen = choose_tokens(recipe, logp, [1.0, -1.0], seed=0)
    # deviations of log-prob 2, 1, 0, −1, −2 times those of the advantage 0.8 ×3, −1.2 ×2: 1.6, 0.8, 0, 1.2, 2.4
    assert [row.tolist() for row in chosen] == [[True, False, False], [False, True]]


def test_clip_cov_draws_the_same_tokens_for_the_same_seed():
    recipe = ObjectiveConfig(exploration=ExplorationConfig(kind="clip_cov", fraction=0.2, cov_low=-1e9, cov_high=1e9))
    draw = torch.Generator().manual_seed(0)
    logp = [-torch.rand(length, generator=draw) for length in (30, 20, 50)]
    first, again, other = (choose_tokens(recipe, logp, [1.0, 0.0, -1.0], seed=seed) for seed in (5, 5, 6))
    assert [row.tolist() for row in first] == [row.tolist() for row in again]
    assert [row.tolist() for row in first] != [row.tolist() for row in other]
    assert [len(row) for row in first] == [30, 20, 50]
    assert sum(int(row.sum()) for row in first) == 20
