"""The recipe's objective in the form of `ullim.objective`, which knows no config, and its denominators."""

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from ullim.config.objective import ObjectiveConfig
from ullim.objective.losses import clip_cov_tokens, kl_cov_tokens
from ullim.objective.policy_loss import LossSettings
from ullim.records import Sequence


def loss_settings(objective: ObjectiveConfig) -> LossSettings:
    """The same objective, flat."""
    correction, exploration = objective.correction, objective.exploration
    return LossSettings(
        ratio_level=objective.ratio,
        clip_low=objective.clip_low,
        clip_high=objective.clip_high,
        dual_clip=objective.dual_clip,
        anchor="rollout" if correction.anchor == "rollout" else "old",
        correction=correction.mode,
        correction_level=correction.level,
        correction_cap=correction.cap,
        correction_floor=correction.floor,
        aggregation=objective.aggregation,
        kl_kind=objective.kl_kind,
        kl_coefficient=objective.kl_coefficient,
        entropy_coefficient=exploration.entropy_bonus,
        exploration=exploration.kind,
        kl_cov_coefficient=exploration.kl_coefficient,
    )


def denominator(sequences: SequenceOf[Sequence], settings: LossSettings, max_new_tokens: int) -> float:
    """What the losses of one update are divided by, counted over all ranks before anything is cut."""
    if settings.aggregation == "token-mean":
        return float(sum(len(sequence.token_ids) for sequence in sequences))
    if settings.aggregation == "sequence-mean":
        return float(len(sequences))
    return float(len(sequences) * max_new_tokens)


def choose_tokens(
    objective: ObjectiveConfig, logp: SequenceOf[Tensor], advantages: SequenceOf[float], seed: int
) -> list[Tensor]:
    """The tokens that Clip-Cov or KL-Cov restrains, over one whole update: bool [length] per sequence.

    `logp` are the learner's log-probs [length] of every sequence of the update, the same on every rank, so that with
    the same `seed` all ranks choose the same tokens.
    """
    exploration = objective.exploration
    grid = torch.nn.utils.rnn.pad_sequence(list(logp), batch_first=True)
    lengths = torch.tensor([len(one) for one in logp])
    mask = torch.arange(grid.shape[1]) < lengths[:, None]
    values = torch.tensor(advantages, dtype=torch.float32)
    if exploration.kind == "clip_cov":
        chosen = clip_cov_tokens(
            grid,
            values,
            mask,
            fraction=exploration.fraction,
            low=exploration.cov_low,
            high=exploration.cov_high,
            generator=torch.Generator().manual_seed(seed),
        )
    else:
        chosen = kl_cov_tokens(grid, values, mask, fraction=exploration.fraction)
    return [row[:length] for row, length in zip(chosen, lengths.tolist(), strict=True)]
