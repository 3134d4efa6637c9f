"""What a run leaves behind of every step: metrics, samples, checkpoints, and a view for whoever watches."""

import time
from collections.abc import Mapping
from typing import Any

from ullim.monitor.clock import BusyCounter
from ullim.monitor.live import LiveView
from ullim.monitor.metrics import Metric, MetricsWriter
from ullim.monitor.recorder import SampleRecorder
from ullim.monitor.samples import rows_from_groups
from ullim.monitor.step_view import SampleView, StepView
from ullim.monitor.summary import summarise
from ullim.orchestration.checkpoints import Checkpoints
from ullim.orchestration.controller import StepOutcome
from ullim.orchestration.peers import Learners, NodeCounters, PeerDied
from ullim.orchestration.publisher import Publication
from ullim.orchestration.supervisor import NodePool, SeatState
from ullim.records import RolloutGroup


class RunReporter:
    """The controller's Observer that writes the run directory."""

    def __init__(
        self,
        *,
        metrics: MetricsWriter,
        samples: SampleRecorder,
        samples_every: int,
        checkpoints: Checkpoints,
        live: LiveView,
        channels: tuple[str, ...],
        pool: NodePool,
        learners: Learners,
    ) -> None:
        self._metrics = metrics
        self._samples = samples
        self._samples_every = samples_every
        self._checkpoints = checkpoints
        self._live = live
        self._channels = channels
        self._pool = pool
        self._learners = learners
        self._busy: dict[str, BusyCounter] = {seat: BusyCounter() for seat in pool.seats}
        self._step_ended = time.monotonic()
        self._publication_s: float | None = None
        self._published_bytes: int | None = None

    async def on_step(self, outcome: StepOutcome) -> None:
        now = time.monotonic()
        seconds, self._step_ended = now - self._step_ended, now
        metrics = self._step_metrics(outcome, seconds) | await self._node_metrics()
        if self._samples_every and outcome.step % self._samples_every == 0:
            self._record_samples(outcome)
        self._metrics.write(outcome.step, metrics)
        self._live.update(StepView.from_metrics(outcome.step, metrics, _shown_sample(outcome.groups)))
        if outcome.report.skipped:
            self._live.note(f"step {outcome.step} moved nothing: {outcome.report.skipped}")

    async def on_publication(self, publication: Publication, seconds: float) -> None:
        self._publication_s = seconds
        self._published_bytes = publication.stats.bytes if publication.stats else None

    async def on_checkpoint(self, version: int, state: Mapping[str, Any]) -> None:
        self._live.status(f"writing the checkpoint of step {version}")
        path = await self._checkpoints.write(version, state, self._learners)
        self._live.note(f"checkpoint {path}")

    def _step_metrics(self, outcome: StepOutcome, seconds: float) -> dict[str, Metric]:
        groups, report = outcome.groups, outcome.report
        answers = [completion for group in groups for completion in group.completions]
        metrics: dict[str, Metric] = dict(report.metrics)
        metrics |= summarise(groups, self._channels, outcome.step - 1)
        metrics |= outcome.assembly.shares
        metrics |= {f"count/{name}": count for name, count in outcome.counters.items()}
        metrics |= {
            "staleness/dropped": outcome.counters.get("answers_stale", 0),
            "timing/step": seconds,
            "timing/wait_for_groups": outcome.wait_s,
            "timing/train": outcome.train_s,
            "timing/generate": _mean([group.timing.generate_s for group in groups]),
            "timing/score": _mean([group.timing.score_s for group in groups]),
            "timing/publish": self._publication_s,
            "weights/bytes": self._published_bytes,
            "utilisation/learner": _share(report.seconds - report.metrics.get("timing/publication_wait", 0.0), seconds),
            "throughput/completions_per_s": len(answers) / seconds if seconds > 0 else None,
            "throughput/tokens_per_s": sum(len(a.token_ids) for a in answers) / seconds if seconds > 0 else None,
            "gate/admitted": outcome.slots_held,
            "gate/capacity": outcome.slots,
            "gate/in_flight": outcome.in_flight,
            "buffer/ready": outcome.buffered,
        }
        return metrics

    async def _node_metrics(self) -> dict[str, Metric]:
        counters: dict[str, NodeCounters] = {}
        for seat in self._pool.in_state(SeatState.SERVING):
            if seat.node is not None:
                try:
                    counters[seat.name] = await seat.node.counters()
                except PeerDied as death:
                    self._pool.died(seat, seat.node, str(death))
        return {
            "utilisation/node": {name: self._busy[name].take(c.generate_busy_s) for name, c in counters.items()},
            "node/running": {name: c.running for name, c in counters.items()},
            "node/waiting": {name: c.waiting for name, c in counters.items()},
            "node/score_busy_s": {name: c.score_busy_s for name, c in counters.items()},
        }

    def _record_samples(self, outcome: StepOutcome) -> None:
        logprobs = outcome.report.sequence_logprobs
        members = outcome.assembly.members
        rows = rows_from_groups(
            outcome.groups,
            learner_version=outcome.step - 1,
            advantages=outcome.assembly.advantages,
            channel_advantages=outcome.assembly.channel_advantages,
            learner_logprobs=dict(zip(members, logprobs, strict=True)) if logprobs else None,
            trained=() if outcome.report.skipped else None,
        )
        self._samples.write(outcome.step, rows)


def _share(part: float, whole: float) -> float | None:
    return min(1.0, part / whole) if whole > 0 else None


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _shown_sample(groups: tuple[RolloutGroup, ...]) -> SampleView | None:
    """One answer for the live view: the first of the youngest group."""
    for group in reversed(groups):
        for completion in group.completions:
            scores = {name: score.value for name, score in completion.scores.items()}
            return SampleView(group.prompt.messages[-1].content, completion.text, scores)
    return None
