"""One version step: forward and backward over micro-batches, then the optimiser, on all ranks together.

    cut ──▶ [log-probs before the step] ──▶ per update: micro-batches ──▶ agree ──▶ clip ──▶ optimiser
             only where updates differ              forward, loss, backward      every rank sees the same
             from the first, or tokens are chosen   (collectives in one order)   loss and gradient norm

Whatever the cut, the losses of an update's micro-batches add up to the loss of the whole update, because each is
divided by denominators counted over all ranks beforehand; so do the gradients, which FSDP sums.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ullim.config.learner import LearnerConfig
from ullim.config.objective import ObjectiveConfig
from ullim.learner.objective import choose_tokens, denominator, loss_settings
from ullim.learner.optimiser import Optimiser
from ullim.learner.packing import PackedBatch, pack
from ullim.learner.partition import MicroBatch, Update, cut_batch
from ullim.learner.policy import ShardedPolicy
from ullim.learner.ranks import Ranks
from ullim.objective.policy_loss import policy_loss
from ullim.objective.tally import Tally
from ullim.records import FloatArray, LearnerBatch

LOSS_PARTS = ("policy", "kl", "entropy")


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step did; the same on every rank.

    `bad` has one line for each update that was skipped because its loss or gradient was not finite; `updates` counts
    those that moved the weights. `suspects` are the places in the batch whose numbers were not finite.
    """

    metrics: dict[str, float]
    updates: int
    bad: tuple[str, ...]
    suspects: tuple[int, ...]
    logprobs: tuple[FloatArray, ...]  # per sequence, at the start of the step


class TrainingStep:
    """Everything a step needs that outlives it. `before_update` is called each time the weights are about to move."""

    def __init__(
        self,
        policy: ShardedPolicy,
        reference: ShardedPolicy | None,
        optimiser: Optimiser,
        ranks: Ranks,
        learner: LearnerConfig,
        objective: ObjectiveConfig,
        *,
        max_new_tokens: int,
        seed: int,
        before_update: Callable[[], None],
    ) -> None:
        self._policy, self._reference, self._optimiser, self._ranks = policy, reference, optimiser, ranks
        self._learner, self._objective, self._settings = learner, objective, loss_settings(objective)
        self._max_new_tokens, self._seed, self._before_update = max_new_tokens, seed, before_update

    def run(self, batch: LearnerBatch, version: int) -> StepOutcome:
        """Train on `batch` at `version`. A collective of all ranks, each with the same batch."""
        started = time.perf_counter()
        updates = cut_batch(
            batch.sequences,
            updates=self._learner.updates_per_step,
            ranks=self._ranks.world_size,
            micro_batch_tokens=self._learner.micro_batch_tokens,
        )
        work = _Work(batch, self._ranks.device)
        first_pass = len(updates) > 1 or self._objective.exploration.kind != "none"
        if first_pass:
            self._measure_start(updates, work)
        bad, norms = [], []
        for number, update in enumerate(updates):
            # π_old is π_θ itself in a lone update, so its log-probs need no pass of their own.
            tally = self._accumulate(update, work, number, version, known_start=first_pass)
            norm = self._optimiser.gradient_norm()
            loss = sum(tally[f"loss_{part}"] for part in LOSS_PARTS)
            if math.isfinite(loss) and math.isfinite(norm):
                norms.append(norm)
                waited = time.perf_counter()
                self._before_update()
                work.seconds["timing/publication_wait"] += time.perf_counter() - waited
                self._optimiser.update(version, norm)
            else:
                bad.append(f"update {number + 1} of {len(updates)}: loss {loss}, gradient norm {norm}")
            self._optimiser.forget_gradients()
            self._policy.forget_whole()
            work.tallies.append(tally)
        if not first_pass:
            self._ranks.total(work.start)
        suspects = self._ranks.largest(work.suspects())
        work.seconds["timing/learner_step"] = time.perf_counter() - started
        return StepOutcome(
            metrics=self._metrics(work, norms, len(updates), version),
            updates=len(norms),
            bad=tuple(bad),
            suspects=tuple(suspects.nonzero().flatten().tolist()),
            logprobs=tuple(work.of(place).cpu().numpy() for place in range(len(batch.sequences))),
        )

    @torch.no_grad()
    def _measure_start(self, updates: tuple[Update, ...], work: "_Work") -> None:
        for update in updates:
            for packed in self._packed(update, work):
                work.record(packed, self._policy.logprobs(packed)[0])
        self._ranks.total(work.start)

    def _packed(self, update: Update, work: "_Work") -> Iterator[PackedBatch]:
        mine: tuple[MicroBatch, ...] = update.ranks[self._ranks.rank]
        for micro_batch in mine:
            packed = pack(work.batch.sequences, micro_batch, self._ranks.device)
            work.input_tokens += packed.input_ids.numel() if micro_batch else 0
            work.micro_batches += 1
            yield packed

    def _accumulate(self, update: Update, work: "_Work", number: int, version: int, *, known_start: bool) -> Tally:
        """Gradients of the whole update, on every rank its shard; the update's tally over all ranks."""
        sequences = [work.batch.sequences[place] for place in update.members]
        whole = denominator(sequences, self._settings, self._max_new_tokens)
        chosen: dict[int, Tensor] | None = None
        if self._objective.exploration.kind != "none":
            flags = choose_tokens(
                self._objective,
                [work.of(place).cpu() for place in update.members],
                [sequence.advantage for sequence in sequences],
                seed=hash((self._seed, version, number)),
            )
            chosen = dict(zip(update.members, flags, strict=True))
        tally = Tally.empty(self._ranks.device)
        for packed in self._packed(update, work):
            loss, part = self._loss(packed, work, whole, chosen, known_start=known_start)
            loss.backward()  # type: ignore[no-untyped-call]
            work.losses.append((packed.members, loss.detach()))  # looked at later: a look would wait for the device
            tally = tally.merge(part)
        vector = tally.to_vector()
        self._ranks.total(vector[: Tally.sums])
        self._ranks.largest(vector[Tally.sums :])
        return Tally.from_vector(vector)

    def _loss(
        self, packed: PackedBatch, work: "_Work", whole: float, chosen: dict[int, Tensor] | None, *, known_start: bool
    ) -> tuple[Tensor, Tally]:
        sequences = [work.batch.sequences[place] for place in packed.members]
        reference = None
        if self._reference is not None:
            with torch.no_grad():
                reference = packed.grid(self._reference.logprobs(packed)[0])
        logp, entropy = self._policy.logprobs(packed)
        if not known_start:
            work.record(packed, logp.detach())
        if self._settings.entropy_coefficient == 0.0:
            entropy = entropy.detach()  # spares the head's backward pass its larger half
        old = [work.of(place) for place in packed.members]
        picked = None if chosen is None else [chosen[place] for place in packed.members]
        empty = logp.new_zeros(0)
        return policy_loss(
            packed.grid(logp),
            packed.grid(entropy),
            packed.grid(torch.cat([empty, *old])) if known_start else None,
            packed.fill([sequence.rollout_logprobs for sequence in sequences]),
            reference,
            torch.tensor([s.advantage for s in sequences] or [0.0], dtype=torch.float32, device=self._ranks.device),
            packed.mask,
            settings=self._settings,
            denominator=whole,
            chosen=None
            if picked is None
            else packed.grid(torch.cat([empty.bool(), *(p.to(empty.device) for p in picked)])),
        )

    def _metrics(self, work: "_Work", norms: list[float], updates: int, version: int) -> dict[str, float]:
        """Everything that is finite; what is not is told by the step's `skipped` and would not be JSON."""
        found = Tally.merge_all(work.tallies).finalise()
        for part in LOSS_PARTS:  # sums over the updates, each already a mean over its own tokens
            found[f"loss/{part}"] = found.get(f"loss/{part}", 0.0) / max(updates, 1)
        counts = self._ranks.total(
            torch.tensor([work.input_tokens, work.micro_batches], dtype=torch.float64, device=self._ranks.device)
        )
        found |= {
            "loss": sum(found[f"loss/{part}"] for part in LOSS_PARTS),
            "learning_rate": self._optimiser.learning_rate(version),
            "learner/input_tokens": float(counts[0]),
            "learner/micro_batches": float(counts[1]),
            "learner/completion_tokens": float(work.batch.tokens),
            **work.seconds,
        }
        if norms:
            found["grad_norm"] = float(np.mean(norms))
        return {name: value for name, value in found.items() if math.isfinite(value)}


@dataclass(slots=True)
class _Work:
    """What one step gathers on one rank. `start` holds the log-probs of all sequences end to end; a rank fills in those
    that it computes and leaves zeros elsewhere, until the ranks add theirs up."""

    batch: LearnerBatch
    device: torch.device
    start: Tensor = field(init=False)
    losses: list[tuple[tuple[int, ...], Tensor]] = field(default_factory=list)  # members and loss of each micro-batch
    tallies: list[Tally] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"timing/publication_wait": 0.0})
    input_tokens: int = 0
    micro_batches: int = 0
    _ends: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._ends = np.cumsum([len(s.token_ids) for s in self.batch.sequences], dtype=np.int64).tolist()
        self.start = torch.zeros(self.batch.tokens, dtype=torch.float32, device=self.device)

    def of(self, place: int) -> Tensor:
        """The start's log-probs of one sequence, a view."""
        return self.start[self._ends[place] - len(self.batch.sequences[place].token_ids) : self._ends[place]]

    def record(self, packed: PackedBatch, logp: Tensor) -> None:
        for place, part in zip(packed.members, torch.split(logp, list(packed.lengths)), strict=True):
            self.of(place).copy_(part)

    def suspects(self) -> Tensor:
        """float32 [sequences]: 1 where the advantage or a log-prob is not finite, or the loss of the micro-batch is not
        although no member is to blame by itself. Call it when `start` is complete."""
        broken = [not math.isfinite(sequence.advantage) for sequence in self.batch.sequences]
        if not bool(self.start.isfinite().all()):
            broken = [b or not bool(self.of(place).isfinite().all()) for place, b in enumerate(broken)]
        for members, loss in self.losses:
            if not bool(loss.isfinite()) and not any(broken[member] for member in members):
                for member in members:
                    broken[member] = True
        return torch.tensor(broken, dtype=torch.float32, device=self.device)
