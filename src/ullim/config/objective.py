"""The objective of docs/objective.md, as settings."""

from typing import Literal

from pydantic import Field, model_validator

from ullim.config.base import Section


class AdvantageConfig(Section):
    """How rewards become advantages."""

    kind: Literal["decoupled", "summed"] = "decoupled"
    """`decoupled` (GDPO): every channel normalised in its group, then weighted and summed, then normalised over
    the step. `summed`: weighted rewards are summed, then normalised; the channel with the largest spread wins."""

    scale: Literal["group", "batch", "none"] = "group"
    """Divisor of a centred reward under `summed`: std of the group (GRPO), of the batch, or none (Dr. GRPO)."""

    batch_normalize: bool = True
    """The last step of `decoupled`."""

    @model_validator(mode="after")
    def _scale_is_for_summed(self) -> "AdvantageConfig":
        if self.kind == "decoupled" and self.scale != "group":
            raise ValueError(f'scale = "{self.scale}" needs kind = "summed"; decoupled always normalises by group')
        return self


class CorrectionConfig(Section):
    """Importance weight between the learner at the start of a batch and the engine that sampled it."""

    mode: Literal["truncate", "mask", "none"] = "truncate"
    """`truncate` is TIS: min(w, cap). `mask` gives weight 0 outside [floor, cap]."""

    level: Literal["token", "sequence", "geometric"] = "token"
    """`sequence` is the product over the answer, `geometric` its mean (mask only)."""

    cap: float = Field(default=2.0, gt=0)
    """Largest weight kept; 2 as in the TIS note and its users."""

    floor: float | None = Field(default=None, ge=0)
    """Smallest weight kept under `mask`."""

    anchor: Literal["learner", "rollout"] = "learner"
    """What PPO's clip is measured from. `rollout` puts the engine's log-prob there (PPO-IS, for the ablation)."""

    @model_validator(mode="after")
    def _consistent(self) -> "CorrectionConfig":
        if self.level == "geometric" and self.mode != "mask":
            raise ValueError(
                f'level = "geometric" needs mode = "mask" (found "{self.mode}"): a bounded mean is a test, not a weight'
            )
        if self.floor is not None and self.mode != "mask":
            raise ValueError(f'floor ({self.floor:g}) needs mode = "mask" (found "{self.mode}")')
        if self.floor is not None and self.floor >= self.cap:
            raise ValueError(f"floor ({self.floor:g}) must be below cap ({self.cap:g})")
        if self.anchor == "rollout" and self.mode != "none":
            raise ValueError(
                f'anchor = "rollout" has the engine\'s log-prob in the ratio already; write mode = "none" '
                f'(found "{self.mode}")'
            )
        return self


class ExplorationConfig(Section):
    """Against entropy collapse; all off unless set."""

    entropy_bonus: float = Field(default=0.0, ge=0)
    """Coefficient of the mean token entropy, added to what is maximised."""

    kind: Literal["none", "clip_cov", "kl_cov"] = "none"
    """Cui et al. 2025: detach (`clip_cov`) or penalise (`kl_cov`) the tokens whose log-prob and advantage covary
    most."""

    fraction: float = Field(default=2e-4, gt=0, le=1)
    """Share of tokens touched."""

    cov_low: float = 1.0
    """`clip_cov` draws from tokens with covariance between this ..."""

    cov_high: float = 5.0
    """... and this."""

    kl_coefficient: float = Field(default=1.0, ge=0)
    """Weight of the penalty of `kl_cov`."""

    @model_validator(mode="after")
    def _range_is_one(self) -> "ExplorationConfig":
        if self.cov_low > self.cov_high:
            raise ValueError(f"cov_low ({self.cov_low:g}) must not exceed cov_high ({self.cov_high:g})")
        return self


class ObjectiveConfig(Section):
    """Everything between scores and the scalar that is minimised."""

    advantage: AdvantageConfig = AdvantageConfig()
    correction: CorrectionConfig = CorrectionConfig()
    exploration: ExplorationConfig = ExplorationConfig()

    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """`sequence` is GSPO, `sequence_token` GSPO-token. Token level is what kept word spacing alive."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Ratio is clipped at 1 - clip_low."""

    clip_high: float = Field(default=0.28, gt=0)
    """Ratio is clipped at 1 + clip_high (clip-higher of DAPO)."""

    dual_clip: float | None = Field(default=None, gt=1)
    """Bound on the loss of a token with negative advantage and a large ratio."""

    aggregation: Literal["token-mean", "sequence-mean", "constant"] = "token-mean"
    """Denominator of the loss: the step's tokens, its sequences, or sequences x max_new_tokens (Dr. GRPO)."""

    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of KL to the starting policy in the loss. Above 0 a frozen copy is kept on the learners."""

    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
