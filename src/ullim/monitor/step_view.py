"""What the live view is told of a step; anything unknown is None and simply not shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from ullim.monitor.metrics import Metric


@dataclass(frozen=True, slots=True)
class SampleView:
    """One answer to show: the last turn of its prompt, the answer, its scores by channel."""

    prompt: str
    answer: str
    scores: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepView:
    """One finished step. Shares and fractions are in [0, 1], lengths in tokens, times in seconds."""

    step: int  # the version it made, 1 .. total_steps
    rewards: Mapping[str, float | None] = field(default_factory=dict)  # mean by channel
    seconds: float | None = None
    completions_per_s: float | None = None
    length_mean: float | None = None
    length_p90: float | None = None
    truncated_fraction: float | None = None
    lag_mean: float | None = None
    lag_max: float | None = None
    dropped: float | None = None  # completions too old, since the run began
    mismatch_k3: float | None = None
    capped_fraction: float | None = None
    clip_fraction: float | None = None  # low and high together
    entropy: float | None = None
    grad_norm: float | None = None
    learner_busy: float | None = None
    nodes_busy: Mapping[str, float] = field(default_factory=dict)  # by node
    admitted: int | None = None  # groups that hold a slot of the gate
    capacity: int | None = None  # slots of the gate
    buffered: int | None = None  # groups ready to train
    sample: SampleView | None = None

    @classmethod
    def from_metrics(cls, step: int, metrics: Mapping[str, Metric], sample: SampleView | None = None) -> Self:
        """The view of a metrics row, by the names under which the loop logs."""

        def number(name: str) -> float | None:
            value = metrics.get(name)
            return None if isinstance(value, Mapping) else value

        def whole(name: str) -> int | None:
            value = number(name)
            return None if value is None else int(value)

        clipped = [number("ratio/clip_low_fraction"), number("ratio/clip_high_fraction")]
        nodes = metrics.get("utilisation/node")
        channels = [name.split("/")[1] for name in metrics if name.startswith("reward/") and name.endswith("/mean")]
        return cls(
            step=step,
            rewards={channel: number(f"reward/{channel}/mean") for channel in channels},
            seconds=number("timing/step"),
            completions_per_s=number("throughput/completions_per_s"),
            length_mean=number("length/mean"),
            length_p90=number("length/p90"),
            truncated_fraction=number("length/truncated_fraction"),
            lag_mean=number("staleness/mean"),
            lag_max=number("staleness/max"),
            dropped=number("staleness/dropped"),
            mismatch_k3=number("mismatch/k3"),
            capped_fraction=number("correction/capped_fraction"),
            clip_fraction=None if None in clipped else sum(part for part in clipped if part is not None),
            entropy=number("entropy"),
            grad_norm=number("grad_norm"),
            learner_busy=number("utilisation/learner"),
            nodes_busy=nodes if isinstance(nodes, Mapping) else {} if nodes is None else {"nodes": nodes},
            admitted=whole("gate/admitted"),
            capacity=whole("gate/capacity"),
            buffered=whole("buffer/ready"),
            sample=sample,
        )
