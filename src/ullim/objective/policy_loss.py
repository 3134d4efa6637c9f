"""The whole objective for one micro-batch: ratio × correction × clip, aggregated, plus KL and entropy terms.

    L = agg( w · clip_loss(r, A) [Clip-Cov | KL-Cov] ) + β · agg( KL(π_θ‖π_ref) ) − γ · agg( entropy )

Every term is divided by the denominator of the whole optimiser step, so the losses and gradients of any partition into
micro-batches and ranks add up to those of the whole batch. The correction w multiplies the policy term only; KL and
entropy terms are regularisers of the states visited, and weighting them would let a masked token escape them.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ullim.objective._masking import check_mask, check_same_shape
from ullim.objective.covariance import clip_cov, kl_cov
from ullim.objective.diagnostics import (
    correction_tally,
    entropy_tally,
    loss_tally,
    mismatch_tally,
    ratio_tally,
    reference_tally,
)
from ullim.objective.importance import (
    CorrectionLevel,
    CorrectionMode,
    RatioLevel,
    check_correction,
    correction_weights,
    invalid_rollout,
    policy_ratio,
    raw_correction,
)
from ullim.objective.losses import Aggregation, KLKind, aggregate, check_clip, clipped_surrogate, kl_estimate
from ullim.objective.tally import Tally


@dataclass(frozen=True, slots=True)
class LossSettings:
    """What the objective is made of. Contradictions raise ValueError at construction.

    `anchor="rollout"` puts the engine's μ in π_old's place inside the clip (PPO-IS); that corrects the mismatch by
    itself, so `correction` must be "none". `exploration` needs the step's chosen tokens, see `policy_loss`.
    """

    ratio_level: RatioLevel = "token"
    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    anchor: Literal["old", "rollout"] = "old"
    correction: CorrectionMode = "truncate"
    correction_level: CorrectionLevel = "token"
    correction_cap: float = 2.0
    correction_floor: float | None = None
    aggregation: Aggregation = "token-mean"
    kl_kind: KLKind = "k3"
    kl_coefficient: float = 0.0
    entropy_coefficient: float = 0.0
    exploration: Literal["none", "clip_cov", "kl_cov"] = "none"
    kl_cov_coefficient: float = 1.0

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high, self.dual_clip)
        check_correction(self.correction, self.correction_level, self.correction_cap, self.correction_floor)
        _check_choice("ratio_level", self.ratio_level, ("token", "sequence", "sequence_token"))
        _check_choice("anchor", self.anchor, ("old", "rollout"))
        _check_choice("aggregation", self.aggregation, ("token-mean", "sequence-mean", "constant"))
        _check_choice("kl_kind", self.kl_kind, ("k1", "k2", "k3"))
        _check_choice("exploration", self.exploration, ("none", "clip_cov", "kl_cov"))
        if self.anchor == "rollout" and self.correction != "none":
            raise ValueError(
                f"anchor='rollout' already divides by the engine's probability; correction={self.correction!r} would "
                "correct twice: write correction='none'"
            )
        for name in ("kl_coefficient", "entropy_coefficient", "kl_cov_coefficient"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be finite and at least 0, got {getattr(self, name)}")


def policy_loss(
    logp: Tensor,
    entropy: Tensor,
    old_logp: Tensor | None,
    rollout_logp: Tensor,
    ref_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    settings: LossSettings,
    denominator: float | Tensor,
    chosen: Tensor | None = None,
) -> tuple[Tensor, Tally]:
    """This micro-batch's share of the step's loss, and its diagnostics.

    Args:
        logp: log π_θ of the sampled tokens [B, T], with gradient.
        entropy: entropy of π_θ [B, T]; with gradient where `entropy_coefficient` is not 0.
        old_logp: log π_old [B, T]; None where the step is the first from these weights, so that π_old = sg[π_θ].
        rollout_logp: log μ [B, T]; NaN or ±inf = missing.
        ref_logp: log π_ref [B, T]; None allowed where `kl_coefficient` is 0. Given, the KL is measured in any case.
        advantages: [B] or [B, T].
        mask: bool [B, T], true for the completion tokens that take part.
        settings: the objective.
        denominator: the whole step's, over all micro-batches and ranks: tokens, non-empty sequences, or
            sequences × token budget, by `settings.aggregation`.
        chosen: bool [B, T], this micro-batch's cut of `clip_cov_tokens` or `kl_cov_tokens` over the whole step;
            required exactly where `settings.exploration` is not "none".

    Returns:
        (loss, tally): a scalar to call backward on, and statistics to merge over micro-batches and ranks.

    Raises:
        ValueError: unequal shapes, a reference or a choice of tokens that the settings need and that is missing.
    """
    check_same_shape(logp=logp, entropy=entropy, rollout_logp=rollout_logp, mask=mask)
    check_mask(mask)
    old_logp = logp.detach() if old_logp is None else old_logp.detach()
    anchor = old_logp
    if settings.anchor == "rollout":
        # A token whose engine log-prob is missing falls back to π_old: ratio π_θ/π_old, as if weight 1.
        anchor = torch.where(invalid_rollout(rollout_logp, mask), old_logp, rollout_logp.detach())

    ratio = policy_ratio(logp, anchor, mask, level=settings.ratio_level)
    low, high, dual = settings.clip_low, settings.clip_high, settings.dual_clip
    level, cap, floor = settings.correction_level, settings.correction_cap, settings.correction_floor
    raw = raw_correction(old_logp, rollout_logp, mask, level=level)
    weights = correction_weights(
        old_logp, rollout_logp, mask, mode=settings.correction, level=level, cap=cap, floor=floor
    )
    surrogate = weights * clipped_surrogate(ratio, advantages, clip_low=low, clip_high=high, dual_clip=dual)
    surrogate = _explore(surrogate, logp, old_logp, mask, chosen, settings)

    def over_step(per_token: Tensor) -> Tensor:
        return aggregate(per_token, mask, mode=settings.aggregation, denominator=denominator)

    policy_term = over_step(surrogate)
    kl_term = entropy_term = torch.zeros_like(policy_term)
    tallies = [
        mismatch_tally(old_logp, rollout_logp, mask),
        correction_tally(raw, weights, mask, mode=settings.correction, cap=cap, floor=floor),
        ratio_tally(ratio.detach(), advantages, mask, clip_low=low, clip_high=high, dual_clip=dual),
        entropy_tally(entropy.detach(), mask),
    ]
    if ref_logp is not None:
        kl = kl_estimate(logp, ref_logp, kind=settings.kl_kind, mask=mask)
        kl_term = settings.kl_coefficient * over_step(kl)
        tallies.append(reference_tally(kl.detach(), mask))
    elif settings.kl_coefficient != 0.0:
        raise ValueError(f"kl_coefficient is {settings.kl_coefficient}, so ref_logp is needed; got None")
    if settings.entropy_coefficient != 0.0:
        entropy_term = -settings.entropy_coefficient * over_step(entropy)
    tallies.append(loss_tally(policy_term, kl_term, entropy_term))
    return policy_term + kl_term + entropy_term, Tally.merge_all(tallies)


def _explore(
    surrogate: Tensor, logp: Tensor, old_logp: Tensor, mask: Tensor, chosen: Tensor | None, settings: LossSettings
) -> Tensor:
    if settings.exploration == "none":
        if chosen is not None:
            raise ValueError("chosen tokens were given, but exploration is 'none'")
        return surrogate
    if chosen is None:
        raise ValueError(
            f"exploration={settings.exploration!r} needs chosen: {settings.exploration}_tokens over the whole step, "
            "cut like the batch (choosing per micro-batch would make the loss depend on the cut)"
        )
    chosen = chosen & mask
    if settings.exploration == "clip_cov":
        return clip_cov(surrogate, chosen)
    return kl_cov(surrogate, chosen, logp, old_logp, coefficient=settings.kl_cov_coefficient)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
