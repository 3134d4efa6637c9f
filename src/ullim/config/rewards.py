"""Reward channels, one section each under `[rewards.NAME]`; NAME is the channel's name everywhere."""

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from ullim.config.base import Section


class ChannelConfig(Section):
    """What every channel has."""

    weight: float = Field(default=1.0, ge=0)
    """Weight of the normalised channel in the advantage. 0 scores and logs it without training on it."""


class LengthChannelConfig(ChannelConfig):
    """Continuous length reward: 1 at the target, falling smoothly on both sides."""

    kind: Literal["length"]

    target: float = Field(gt=0)
    """Wanted length."""

    width_short: float = Field(gt=0)
    """How far below the target the reward falls to exp(-1/2), in `unit`."""

    width_long: float = Field(gt=0)
    """How far above the target the reward falls to exp(-1/2), in `unit`."""

    unit: Literal["tokens", "characters"] = "tokens"
    """What length is counted in."""


class BinaryLengthChannelConfig(ChannelConfig):
    """The 0/1 length reward of the GDPO paper, for comparison: 1 up to the limit, 0 beyond."""

    kind: Literal["length_binary"]

    limit: float = Field(gt=0)
    """Longest length that earns 1."""

    unit: Literal["tokens", "characters"] = "tokens"
    """What length is counted in."""


class OverlongChannelConfig(ChannelConfig):
    """DAPO's soft overlong penalty, for comparison: 0, then falling to -1 over the last `buffer` tokens."""

    kind: Literal["overlong"]

    limit: int = Field(gt=0)
    """Length in tokens from which the penalty is -1."""

    buffer: int = Field(gt=0)
    """Tokens over which it falls from 0 to -1, ending at `limit`."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> "OverlongChannelConfig":
        if self.buffer > self.limit:
            raise ValueError(f"buffer ({self.buffer}) must not exceed limit ({self.limit})")
        return self


class FunctionChannelConfig(ChannelConfig):
    """A user's own reward function. The path is code that will run with your rights."""

    kind: Literal["function"]

    function: str
    """`package.module:function`, importable where the nodes run. Called with a list of samples (each with
    `.messages`, `.text`, `.token_ids`, `.finish`) it returns as many floats (or None for "no score")."""

    timeout_s: float = Field(default=30.0, gt=0)
    """Longest time for one group."""

    retries: int = Field(default=2, ge=0)
    """Further tries after an error or timeout before the group's members are unscored."""

    @field_validator("function")
    @classmethod
    def _has_module_and_name(cls, value: str) -> str:
        module, colon, name = value.partition(":")
        if not (colon and module and name.isidentifier()):
            raise ValueError(f"{value!r} is not of the form package.module:function")
        return value


class ModelChannelConfig(ChannelConfig):
    """A frozen sequence-classification model on the inference node; its raw logit is the score."""

    kind: Literal["model"]

    path: str = Field(min_length=1)
    """A Hugging Face sequence-classification folder with one label, or `builtin:chitchat-kept-talking`."""

    max_tokens: int = Field(default=256, gt=1)
    """Longest input of the reward model; the oldest turns are left out beyond it, never the answer."""

    batch_size: int = Field(default=32, ge=1)
    """Answers scored in one forward pass."""


RewardConfig = Annotated[
    LengthChannelConfig
    | BinaryLengthChannelConfig
    | OverlongChannelConfig
    | FunctionChannelConfig
    | ModelChannelConfig,
    Field(discriminator="kind"),
]
