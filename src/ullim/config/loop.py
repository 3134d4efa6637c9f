"""The loop: how much, how far apart, how long to wait."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from ullim.config.base import Section


class LoopConfig(Section):
    """Pace of the run."""

    mode: Literal["async", "sync"] = "async"
    """`async`: nodes generate while learners train. `sync`: generate, score, train in turn on the same
    devices, the baseline."""

    steps: int = Field(default=100, ge=1)
    """Version steps to take."""

    groups_per_step: int = Field(default=8, ge=1)
    """Prompts trained on in one step."""

    group_size: int = Field(default=8, ge=2)
    """Answers per prompt; their rewards are compared with each other, so one alone teaches nothing."""

    max_staleness: int = Field(default=1, ge=0)
    """η: an answer may be trained on at most this many versions after its oldest token. 0 is on-policy, and the
    default in `sync` mode."""

    prompt_retries: int = Field(default=2, ge=0)
    """How often a prompt whose group came too late is asked again before it is dropped."""

    watchdog_s: float = Field(default=300.0, gt=0)
    """No group finished and no step taken for this long: the run stops with a table of who waits for whom."""

    max_empty_steps: int = Field(default=8, ge=1)
    """Steps in a row in which every advantage is 0 (all rewards failed, or all groups flat) before the run stops."""

    @model_validator(mode="before")
    @classmethod
    def _in_turn_is_on_policy(cls, data: Any) -> Any:
        """Sync mode's default, so that the recipe as resolved says what was in force."""
        in_turn = isinstance(data, Mapping) and data.get("mode") == "sync"
        return {"max_staleness": 0, **data} if in_turn else data

    @model_validator(mode="after")
    def _no_staleness_in_turn(self) -> "LoopConfig":
        if self.mode == "sync" and self.max_staleness != 0:
            raise ValueError(
                f'mode = "sync" is on-policy; write max_staleness = 0 or mode = "async" (found {self.max_staleness})'
            )
        return self
