"""The whole recipe: sections together, and what must hold between them."""

import re

from pydantic import Field, field_validator, model_validator

from ullim.config.base import Section
from ullim.config.engine import NodesConfig, SamplingConfig, TransformersEngineConfig
from ullim.config.learner import LearnerConfig
from ullim.config.loop import LoopConfig
from ullim.config.objective import ObjectiveConfig
from ullim.config.policy import PolicyConfig
from ullim.config.prompts import PromptsConfig
from ullim.config.rewards import RewardConfig
from ullim.config.weights import WeightsConfig


class MonitorConfig(Section):
    """What is written while the run goes on."""

    samples_every: int = Field(default=1, ge=0)
    """Write every k-th step's samples to Parquet; 0 writes none. Samples hold prompts and answers: personal data."""

    redact: str | None = None
    """`package.module:function` applied to every text before it is written to disk (str -> str)."""

    tensorboard: bool = True
    """Also write TensorBoard events."""


class CheckpointConfig(Section):
    """What survives a crash."""

    every: int = Field(default=50, ge=1)
    """Steps between checkpoints; the last step always makes one."""

    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""


class RunConfig(Section):
    """Where the run lives."""

    dir: str = "runs/{name}"
    """Run directory. `{name}` is replaced by `name`."""

    name: str = "run"
    """Name of the run: letters, digits, `_`, `.` and `-`, not starting with `.` or `-`."""

    seed: int = Field(default=0, ge=0)
    """Seed of prompt order, sampling and initialisation."""

    @field_validator("name")
    @classmethod
    def _name_is_a_folder(cls, value: str) -> str:
        if not re.fullmatch(r"\w[\w.-]*", value):
            raise ValueError(f"{value!r} must hold letters, digits, _ . and - only, and not start with . or -")
        return value

    @field_validator("dir")
    @classmethod
    def _only_name_is_filled_in(cls, value: str) -> str:
        try:
            value.format(name="name")
        except (LookupError, ValueError, AttributeError, TypeError) as error:
            raise ValueError(f"{value!r} has braces that are not {{name}}; write literal ones twice") from error
        return value


class Recipe(Section):
    """Everything that `ullim train` needs, read from one TOML file and dotted overrides."""

    policy: PolicyConfig
    prompts: PromptsConfig
    rewards: dict[str, RewardConfig]
    run: RunConfig = RunConfig()
    sampling: SamplingConfig = SamplingConfig()
    engine: TransformersEngineConfig = TransformersEngineConfig()
    nodes: NodesConfig = NodesConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    learner: LearnerConfig = LearnerConfig()
    loop: LoopConfig = LoopConfig()
    weights: WeightsConfig = WeightsConfig()
    monitor: MonitorConfig = MonitorConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="after")
    def _sections_agree(self) -> "Recipe":
        loop, learner = self.loop, self.learner
        if not self.rewards:
            raise ValueError("[rewards] is empty; write at least one channel, such as [rewards.length]")
        if loop.groups_per_step % learner.updates_per_step:
            raise ValueError(
                f"loop.groups_per_step ({loop.groups_per_step}) must be divisible by learner.updates_per_step "
                f"({learner.updates_per_step}), or the updates of a step would weigh groups differently"
            )
        if all(channel.weight == 0 for channel in self.rewards.values()):
            raise ValueError("every channel of [rewards] has weight 0; give at least one a positive weight")
        for name in self.rewards:
            if not name.replace("-", "_").isidentifier():
                raise ValueError(
                    f"rewards.{name}: a channel's name holds letters, digits, _ and - only and starts with no digit"
                )
        return self

    @property
    def max_staleness(self) -> int:
        """η in force."""
        return self.loop.max_staleness
