"""The learner: one object per rank, all of them called alike.

Inside it nothing knows of Ray; a rank is a process with a place (`RankPlace`), and the same calls in the same order on
every rank keep the collectives in step.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ullim.config.learner import LearnerConfig
from ullim.config.objective import ObjectiveConfig
from ullim.config.policy import PolicyConfig
from ullim.learner.allocator import keep_freed_memory
from ullim.learner.bad_steps import BadSteps
from ullim.learner.checkpoint import load_state, save_state
from ullim.learner.export import export_folder
from ullim.learner.optimiser import Optimiser
from ullim.learner.packing import check_sequences
from ullim.learner.policy import ShardedPolicy, load_policy
from ullim.learner.publish import Publication, Publisher
from ullim.learner.ranks import RankPlace, Ranks
from ullim.learner.step import TrainingStep
from ullim.records import LearnerBatch, StepReport
from ullim.weights.manifest import WeightManifest, build_manifest
from ullim.weights.transport import Sender


class Learner:
    """Trains the policy, one version step after another.

    Args:
        policy: the model; `path` is a folder here (whoever knows `builtin:` names has resolved them).
        learner: optimiser, micro-batches, tolerance of bad steps.
        objective: what is minimised. With `kl_coefficient` > 0 a frozen copy of the starting policy is kept.
        temperature: of the rollouts.
        max_new_tokens: token budget of an answer, the denominator of `constant` aggregation.
        place: which rank this is, and where the ranks meet. The constructor returns once all are there.
        seed: of the few choices that are drawn (Clip-Cov).
        bad_samples: JSON-lines file for the samples of the last bad step before the run stops.
        before_update: called before every optimiser update, in the thread of `step`, and may block: whoever
            publishes can hold the weights until all ranks have sent them.

    Raises:
        BadInput: a model that cannot be trained exactly, or settings that contradict each other.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        learner: LearnerConfig,
        objective: ObjectiveConfig,
        *,
        temperature: float,
        max_new_tokens: int,
        place: RankPlace,
        seed: int = 0,
        bad_samples: str | Path = "bad_samples.jsonl",
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._policy_config = policy
        self._version = 0
        self._ranks = Ranks(place)
        if self._ranks.device.type == "cpu":
            keep_freed_memory()
        self._compute_dtype: torch.dtype = getattr(torch, policy.compute_dtype)

        def load(*, frozen: bool) -> ShardedPolicy:
            return load_policy(
                policy.path,
                self._ranks,
                compute_dtype=self._compute_dtype,
                temperature=temperature,
                chunk_tokens=learner.logprob_chunk_tokens,
                gradient_checkpointing=policy.gradient_checkpointing,
                frozen=frozen,
            )

        self._policy = load(frozen=False)
        reference = load(frozen=True) if objective.kl_coefficient > 0 else None
        self._optimiser = Optimiser(self._policy.parameters, learner, self._ranks)
        self._publisher = Publisher(self._policy.weights, self._ranks)
        self._bad_steps = BadSteps(learner.max_bad_steps, Path(bad_samples))

        def weights_may_move() -> None:
            before_update()
            self._publisher.wait_until_still()

        self._step = TrainingStep(
            self._policy,
            reference,
            self._optimiser,
            self._ranks,
            learner,
            objective,
            max_new_tokens=max_new_tokens,
            seed=seed,
            before_update=weights_may_move,
        )

    @property
    def version(self) -> int:
        """Version steps taken; the label of the current weights."""
        return self._version

    def step(self, batch: LearnerBatch) -> StepReport:
        """Take one version step. Every rank is given the whole batch and takes its own part of it.

        Raises:
            BadInput: a sequence that cannot be computed.
            ValueError: a batch that was assembled for another version.
            RunFailed: too many bad steps in a row, or a publication that does not end.
        """
        if batch.version != self._version:
            raise ValueError(f"the batch is for learner version {batch.version}, the learner is at {self._version}")
        if not batch.sequences:
            raise ValueError("a learner batch needs at least one sequence")
        check_sequences(batch.sequences, vocabulary=self._policy.vocabulary, context=self._policy.context)
        started = time.perf_counter()
        outcome = self._step.run(batch, self._version)
        self._version += 1
        self._bad_steps.judge(batch, outcome, write=self._ranks.is_first)
        return StepReport(
            version=self._version,
            metrics=outcome.metrics | {"learner/bad_steps": float(self._bad_steps.total)},
            seconds=time.perf_counter() - started,
            skipped="; ".join(outcome.bad) if outcome.updates == 0 else None,
            sequence_logprobs=outcome.logprobs if self._ranks.is_first else (),
        )

    def manifest(self, dtype: torch.dtype | None, buffer_bytes: int) -> WeightManifest:
        """What `publish` sends: the weights in `dtype` (None: float32 as they are), tied ones once."""
        return build_manifest(self._policy.weights, dtype=dtype, buffer_bytes=buffer_bytes, tied=self._policy.tied)

    def publish(self, sender: Sender | None, manifest: WeightManifest) -> Publication:
        """Begin to send the current weights under the current version, on every rank; the sender is rank 0's.

        Returns at once. The next step may run meanwhile: it waits for the end before its optimiser moves.
        """
        return self._publisher.publish(sender, manifest, self._version)

    def full_parameters(self, manifest: WeightManifest) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) in manifest order, whole on rank 0 and empty elsewhere; exhaust it on every rank."""
        self._publisher.wait_until_ended()
        return self._publisher.full_weights(manifest)

    def export(self, directory: str | Path) -> None:
        """Write a Hugging Face folder that can be served, in the dtype of computation. A collective."""
        self._publisher.wait_until_ended()
        export_folder(
            Path(directory),
            self._publisher,
            self.manifest(self._compute_dtype, 2**20),
            Path(self._policy_config.path),
            write=self._ranks.is_first,
            template=self._policy_config.chat_template,
        )
        self._ranks.barrier()

    def save(self, directory: str | Path) -> None:
        """Write `directory`/model (a Hugging Face folder) and `directory`/state (everything needed to go on).

        A collective. Not atomic by itself: write into a temporary folder and rename it when every rank has returned.
        """
        self.export(Path(directory) / "model")
        save_state(Path(directory) / "state", self._policy, self._optimiser, self._ranks, version=self._version)

    def load(self, directory: str | Path) -> None:
        """Go on exactly where `save` was called; the number of ranks may differ. A collective.

        Raises:
            BadInput: not such a checkpoint, an incomplete one, or one of another model.
        """
        self._publisher.wait_until_still()
        self._version = load_state(Path(directory) / "state", self._policy, self._optimiser, self._ranks)
        self._policy.forget_whole()

    def close(self) -> None:
        """Wait for a running publication and leave the process groups."""
        self._publisher.wait_until_ended()
        self._ranks.close()
