"""InferenceNode: one generation engine and every reward model, in one process on one set of devices.

A plain class; `placement.py` makes a Ray actor of it. A group is scored where it was generated, as soon as its
last answer ends.
"""

import asyncio
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import AutoTokenizer

from ullim.config.engine import SamplingConfig, TransformersEngineConfig
from ullim.config.rewards import RewardConfig
from ullim.engines.base import CompletionDelta, Engine, GenerationRequest, Sampling
from ullim.engines.transformers import TransformersEngine
from ullim.monitor.clock import BusyClock
from ullim.orchestration.completions import join_deltas
from ullim.orchestration.peers import NodeCounters, RolloutTask
from ullim.records import Completion, RolloutGroup, RolloutTiming, Score
from ullim.rewards.build import build_channels
from ullim.rewards.channel import RewardChannel
from ullim.weights.gloo_receiver import WeightReceiver
from ullim.weights.manifest import WeightManifest
from ullim.weights.session import SessionAddress


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """All that a node needs to start anywhere; small and picklable."""

    name: str
    model_path: str
    engine: TransformersEngineConfig
    sampling: SamplingConfig
    rewards: Mapping[str, RewardConfig]
    max_context: int
    threads: int
    device: str
    seed: int
    transfer_deadline_s: float


class InferenceNode:
    """See the module's docstring. All methods but `start` may overlap; the engine orders what must not."""

    _engine: Engine
    _channels: dict[str, RewardChannel]

    def __init__(self, spec: NodeSpec) -> None:
        self._spec = spec
        self._receiver: WeightReceiver | None = None
        self._manifest: WeightManifest | None = None
        self._scoring = BusyClock()

    async def start(self) -> None:
        """Load engine and reward models. Apart from the constructor, so that what goes wrong is raised as it is."""
        spec = self._spec
        torch.set_num_threads(spec.threads)
        self._tokenizer = AutoTokenizer.from_pretrained(spec.model_path)
        self._engine = TransformersEngine(
            spec.model_path,
            dtype=spec.engine.dtype,
            device=spec.device,
            max_running=spec.engine.max_running,
            max_context=spec.max_context,
            threads=spec.threads,
            seed=spec.seed,
        )
        self._channels = build_channels(spec.rewards, device=spec.device, threads=spec.threads)

    async def rollout(self, task: RolloutTask) -> RolloutGroup:
        """Generate `group_size` answers, then have every channel score them."""
        started = time.monotonic()
        answers = await self._generate(task)
        generated = time.monotonic()
        scores = await self._score(task, answers)
        finished = time.monotonic()
        return RolloutGroup(
            ticket=task.ticket,
            prompt=task.prompt,
            completions=tuple(a.with_scores(s) for a, s in zip(answers, scores, strict=True)),
            node=self._spec.name,
            timing=RolloutTiming(generate_s=generated - started, score_s=finished - generated),
        )

    async def join(self, address: SessionAddress, manifest: WeightManifest) -> None:
        """Enter a transfer session, leaving an earlier one; its transfers will be of `manifest`."""
        self._leave_session()
        deadline = self._spec.transfer_deadline_s
        self._receiver = await asyncio.to_thread(WeightReceiver, address, deadline_s=deadline)
        self._manifest = manifest

    async def receive(self, version: int) -> None:
        """Pause, take the weights, resume; the engine keeps its old weights if the transfer fails."""
        if self._receiver is None or self._manifest is None:
            raise RuntimeError(f"{self._spec.name} was asked to receive before it joined a session")
        await self._engine.pause("keep")
        try:
            await self._engine.receive_weights(self._manifest, self._receiver, version)
        except BaseException:
            self._leave_session()
            raise
        finally:
            await self._engine.resume()

    async def sleep(self) -> None:
        await self._engine.pause("keep")
        await self._engine.sleep()

    async def wake(self) -> None:
        await self._engine.wake()
        await self._engine.resume()

    async def clear(self) -> None:
        """End everything that is being generated."""
        await self._engine.pause("abort")
        await self._engine.resume()

    async def counters(self) -> NodeCounters:
        load = self._engine.load()
        return NodeCounters(
            version=self._engine.version,
            running=load.running,
            waiting=load.waiting,
            generated_tokens=load.generated_tokens,
            generate_busy_s=load.busy_s,
            score_busy_s=self._scoring.busy_s,
        )

    async def close(self) -> None:
        self._leave_session()
        await self._engine.close()
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))

    async def pid(self) -> int:
        """For logs and for tests that kill a node."""
        return os.getpid()

    def _leave_session(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None

    async def _generate(self, task: RolloutTask) -> list[Completion]:
        sampling = self._spec.sampling
        request = GenerationRequest(
            request_id=f"{task.ticket}",
            prompt_ids=task.prompt.token_ids,
            n=task.group_size,
            sampling=Sampling(
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
                stop_strings=sampling.stop_strings,
                seed=task.seed,
            ),
        )
        deltas: dict[int, list[CompletionDelta]] = {}
        async for delta in self._engine.generate([request]):
            deltas.setdefault(delta.member, []).append(delta)
        return [join_deltas(deltas[member], self._decode) for member in sorted(deltas)]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    async def _score(self, task: RolloutTask, answers: list[Completion]) -> list[dict[str, Score]]:
        with self._scoring.busy():
            columns = await asyncio.gather(
                *(channel.score(task.prompt, answers) for channel in self._channels.values())
            )
        return [dict(zip(self._channels, row, strict=True)) for row in zip(*columns, strict=True)]
