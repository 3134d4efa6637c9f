"""One run from a checked recipe to its result: everything is put together here, and taken apart again."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ullim.config.run import Recipe
from ullim.monitor.live import LiveView
from ullim.monitor.metrics import MetricsWriter
from ullim.monitor.recorder import SampleRecorder
from ullim.monitor.rewind import rewind
from ullim.monitor.run_directory import RunDirectory
from ullim.orchestration.changes import Changes, within
from ullim.orchestration.checkpoints import Checkpoints
from ullim.orchestration.controller import Controller
from ullim.orchestration.heldout import HeldoutResult, measure
from ullim.orchestration.learners import LearnerSpec
from ullim.orchestration.material import Material, read_material
from ullim.orchestration.node import NodeSpec
from ullim.orchestration.peers import LearnerDied
from ullim.orchestration.placement import RayLearners, RayNode, ray_session, share_threads
from ullim.orchestration.publisher import WeightPublisher
from ullim.orchestration.reporting import RunReporter
from ullim.orchestration.stream import PromptStream
from ullim.orchestration.supervisor import START_DEADLINE_S, NodePool
from ullim.rewards.imports import import_function


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a finished run left things. `before` and `after` are None where no held-out prompts were asked for."""

    directory: Path
    checkpoint: Path
    version: int
    before: HeldoutResult | None
    after: HeldoutResult | None


def train(recipe: Recipe, *, resume: bool = False, console: Console | None = None) -> RunResult:
    """Run `recipe` to its end, on this machine or on the cluster of RAY_ADDRESS.

    A learner that dies takes the run back to its newest checkpoint, `learner.restarts` times at most. Raises
    BadInput before any process starts for whatever is wrong with recipe, prompts or run directory; RunFailed, with
    everything written so far intact, when a run that started cannot go on.
    """
    material = read_material(recipe)
    for name, channel in recipe.rewards.items():
        if channel.kind == "function":  # the nodes import it; a name that leads nowhere should not wait for them
            import_function(channel.function, key=f"rewards.{name}.function")
    restarts = 0
    while True:
        try:
            return _attempt(recipe, material, resume=resume, console=console)
        except LearnerDied as death:
            folder = RunDirectory.open(_directory(recipe)).checkpoints
            restarts += 1
            if restarts > recipe.learner.restarts or not Checkpoints(folder, recipe.checkpoint.keep).all():
                raise
            (console or Console()).print(f"note: {death}; going on from the newest checkpoint")
            resume = True


def _directory(recipe: Recipe) -> Path:
    return Path(recipe.run.dir.format(name=recipe.run.name)).expanduser()


def _attempt(recipe: Recipe, material: Material, *, resume: bool, console: Console | None) -> RunResult:
    """One life of the run's processes, from a fresh directory or from its newest checkpoint."""
    redact = import_function(recipe.monitor.redact, key="monitor.redact") if recipe.monitor.redact else None
    resolved = recipe.model_dump(mode="json", exclude_none=True)
    checkpoint, version = None, 0
    if resume:
        directory = RunDirectory.open(_directory(recipe))
        complete = Checkpoints(directory.checkpoints, recipe.checkpoint.keep).all()
        if complete:  # a run that ended before its first checkpoint begins again
            checkpoint = complete[-1][1]
            version = int(Checkpoints.state(checkpoint)["version"])
        rewind(directory, first_step=version + 1)  # refuses a run that somebody else is writing, so it comes first
        directory.replace_config(resolved)
    else:
        directory = RunDirectory.create(_directory(recipe), resolved)
    channels = tuple(recipe.rewards)
    with contextlib.ExitStack() as stack:
        metrics = stack.enter_context(MetricsWriter(directory, tensorboard=recipe.monitor.tensorboard))
        samples = SampleRecorder(directory, channels, redact=redact)
        live = stack.enter_context(
            LiveView(recipe.loop.steps, channels, title=recipe.run.name, first_step=version, console=console)
        )
        for reason, count in material.left_out.items():
            live.note(f"{count} prompts left out: {reason}")
        live.status("starting Ray")
        live.note(f"process logs: {stack.enter_context(ray_session())}")
        run = Run(recipe, material, directory, metrics, samples, live, redact)
        return asyncio.run(run.to_the_end(checkpoint))


class Run:
    """The processes of one run and what connects them."""

    def __init__(
        self,
        recipe: Recipe,
        material: Material,
        directory: RunDirectory,
        metrics: MetricsWriter,
        samples: SampleRecorder,
        live: LiveView,
        redact: Callable[[str], str] | None,
    ) -> None:
        self._recipe = recipe
        self._material = material
        self._directory = directory
        self._metrics = metrics
        self._samples = samples
        self._live = live
        self._redact = redact
        self._changes = Changes()
        self._checkpoints = Checkpoints(directory.checkpoints, recipe.checkpoint.keep)
        self._threads = share_threads(recipe, os.cpu_count() or 1)

    async def to_the_end(self, checkpoint: Path | None) -> RunResult:
        """Start, measure, train, measure again, end every process."""
        recipe = self._recipe
        async with self._processes() as (learners, pool):
            publisher = WeightPublisher(
                learners, pool, attempts=recipe.weights.attempts, deadline_s=recipe.weights.deadline_s
            )
            controller = Controller(
                recipe,
                stream=self._stream(),
                pool=pool,
                learners=learners,
                publisher=publisher,
                observer=self._reporter(pool, learners),
                changes=self._changes,
            )
            if checkpoint is not None:
                self._live.status(f"loading {checkpoint}")
                await within(START_DEADLINE_S, learners.load(checkpoint.resolve()), f"{checkpoint} was not loaded")
                controller.restore(Checkpoints.state(checkpoint))
            await publisher.publish(controller.version)  # proves the path before the first prompt
            before = await self._measure(pool, "before", controller.version)
            self._live.status("training")
            await controller.run()
            clearing = (seat.node.clear() for seat in pool.seats.values() if seat.node is not None)
            await within(recipe.loop.watchdog_s, asyncio.gather(*clearing), "the nodes did not stop generating")
            after = await self._measure(pool, "after", controller.version)
            return RunResult(
                directory=self._directory.path,
                checkpoint=self._checkpoints.newest(),
                version=controller.version,
                before=before,
                after=after,
            )

    @contextlib.asynccontextmanager
    async def _processes(self) -> AsyncIterator[tuple[RayLearners, NodePool]]:
        """Learners and nodes, started side by side and ended whatever happens."""
        recipe = self._recipe
        pool = NodePool(
            [f"node-{number}" for number in range(recipe.nodes.count)],
            self._launch_node,
            restarts=recipe.nodes.restarts,
            changes=self._changes,
            note=self._live.note,
        )
        self._live.status("loading the policy on learners and nodes, and the reward models")
        learners_starting = asyncio.create_task(self._launch_learners())
        try:
            _, learners = await asyncio.gather(pool.start(), learners_starting)
            try:
                yield learners, pool
            finally:
                await learners.close()
        finally:
            learners_starting.cancel()
            await pool.close()

    async def _launch_learners(self) -> RayLearners:
        learner = self._recipe.learner
        launch = RayLearners.launch(self._learner_spec(), learner.ranks, learner.gpus_per_rank)
        return await within(START_DEADLINE_S, launch, f"{learner.ranks} learner ranks did not start")

    async def _launch_node(self, name: str) -> RayNode:
        recipe = self._recipe
        spec = NodeSpec(
            name=name,
            model_path=recipe.policy.path,
            engine=recipe.engine,
            sampling=recipe.sampling,
            rewards=recipe.rewards,
            max_context=self._material.context,
            threads=self._threads.node,
            device="cuda" if recipe.nodes.gpus_per_node else "cpu",
            seed=recipe.run.seed,
            transfer_deadline_s=recipe.weights.deadline_s,
        )
        return await RayNode.launch(spec, recipe.nodes.gpus_per_node)

    def _learner_spec(self) -> LearnerSpec:
        recipe = self._recipe
        return LearnerSpec(
            policy=recipe.policy,
            learner=recipe.learner,
            objective=recipe.objective,
            temperature=recipe.sampling.temperature,
            max_new_tokens=recipe.sampling.max_new_tokens,
            threads=self._threads.learner,
            device="cuda" if recipe.learner.gpus_per_rank else "cpu",
            seed=recipe.run.seed,
            bad_samples_path=str((self._directory.path / "bad_samples.jsonl").resolve()),
            engine_dtype=recipe.engine.dtype,
            buffer_bytes=recipe.weights.buffer_bytes,
            transfer_bind=recipe.weights.bind,
            transfer_deadline_s=recipe.weights.deadline_s,
            transfer_checksum=recipe.weights.checksum,
        )

    def _stream(self) -> PromptStream:
        recipe = self._recipe
        return PromptStream(
            self._material.prompts,
            seed=recipe.run.seed,
            shuffle=recipe.prompts.shuffle,
            epochs=recipe.prompts.epochs,
            retries=recipe.loop.prompt_retries,
        )

    def _reporter(self, pool: NodePool, learners: RayLearners) -> RunReporter:
        return RunReporter(
            metrics=self._metrics,
            samples=self._samples,
            samples_every=self._recipe.monitor.samples_every,
            checkpoints=self._checkpoints,
            live=self._live,
            channels=tuple(self._recipe.rewards),
            pool=pool,
            learners=learners,
        )

    async def _measure(self, pool: NodePool, name: str, version: int) -> HeldoutResult | None:
        """Held-out figures, kept in the run directory; a resumed run keeps those of its beginning."""
        if not self._material.heldout:
            return None
        path = self._directory.path / f"heldout-{name}.json"
        if name == "before" and path.exists():
            return HeldoutResult.read(path)
        self._live.status(f"answering {len(self._material.heldout)} held-out prompts {name} training")
        result = await measure(
            pool,
            self._material.heldout,
            tuple(self._recipe.rewards),
            version=version,
            answers=self._recipe.prompts.heldout_answers,
            seed=self._recipe.run.seed,
            limit_s=self._recipe.loop.watchdog_s,
        )
        result.write(path, self._redact)
        return result
