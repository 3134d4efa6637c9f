"""Held-out prompts answered and scored on the nodes: what a run is judged by before and after."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from ullim.errors import RunFailed
from ullim.monitor.files import write_atomically
from ullim.orchestration.peers import PeerDied, RolloutTask
from ullim.orchestration.supervisor import NodePool
from ullim.records import Prompt, RolloutGroup


@dataclass(frozen=True, slots=True)
class HeldoutAnswer:
    """One answer, for reading side by side."""

    prompt_id: str
    last_turn: str
    text: str
    tokens: int
    scores: dict[str, float | None]


@dataclass(frozen=True, slots=True)
class HeldoutResult:
    """Means over all answers that have a score; `answers` in the order of prompts, so before and after pair up."""

    version: int
    rewards: dict[str, float | None]
    length_mean: float
    truncated_fraction: float
    answers: tuple[HeldoutAnswer, ...]

    def write(self, path: Path, redact: Callable[[str], str] | None = None) -> None:
        """As JSON; every prompt and answer passes through `redact` first."""
        told = self.answers
        if redact is not None:
            told = tuple(replace(a, last_turn=redact(a.last_turn), text=redact(a.text)) for a in told)
        text = json.dumps(asdict(replace(self, answers=told)), ensure_ascii=False, allow_nan=False, indent=1)
        write_atomically(path, lambda temporary: _write_text(temporary, text))

    @classmethod
    def read(cls, path: Path) -> "HeldoutResult":
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**data, "answers": tuple(HeldoutAnswer(**answer) for answer in data["answers"])})


async def measure(
    pool: NodePool,
    prompts: Sequence[Prompt],
    channels: Sequence[str],
    *,
    version: int,
    answers: int,
    seed: int,
    limit_s: float,
) -> HeldoutResult:
    """Draw `answers` per prompt on the serving nodes, with one seed per prompt whatever the version.

    RunFailed when no group has finished for `limit_s` seconds, PeerDied when a node dies.
    """
    tasks = [RolloutTask(-1 - place, prompt, answers, seed + place) for place, prompt in enumerate(prompts)]
    groups = await _answer_all(pool, tasks, limit_s)
    drawn = [(group, completion) for group in groups for completion in group.completions]
    if not drawn:
        raise RunFailed(f"none of {len(tasks)} held-out prompts got an answer")
    told = tuple(
        HeldoutAnswer(
            prompt_id=group.prompt.prompt_id,
            last_turn=group.prompt.messages[-1].content,
            text=completion.text,
            tokens=len(completion.token_ids),
            scores={name: score.value for name, score in completion.scores.items()},
        )
        for group, completion in drawn
    )
    scored = {name: [v for a in told if (v := a.scores.get(name)) is not None] for name in channels}
    return HeldoutResult(
        version=version,
        rewards={name: fmean(values) if values else None for name, values in scored.items()},
        length_mean=fmean(answer.tokens for answer in told),
        truncated_fraction=fmean(completion.finish == "length" for _, completion in drawn),
        answers=told,
    )


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


async def _answer_all(pool: NodePool, tasks: Sequence[RolloutTask], limit_s: float) -> list[RolloutGroup]:
    """All groups in the order of `tasks`, as long as one finishes every `limit_s` seconds."""
    asked = [asyncio.create_task(_ask(pool, task)) for task in tasks]
    pending = set(asked)
    try:
        while pending:
            done, pending = await asyncio.wait(pending, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise RunFailed(
                    f"{len(pending)} of {len(tasks)} held-out prompts were not answered: no group has finished for "
                    f"{limit_s:g} s (loop.watchdog_s)"
                )
            for task in done:
                task.result()
    finally:
        for task in pending:
            task.cancel()
    return [task.result() for task in asked]


async def _ask(pool: NodePool, task: RolloutTask) -> RolloutGroup:
    """A death is the pool's to mend; here, outside the loop, it ends the measurement."""
    seat = pool.pick()
    if seat is None:
        raise PeerDied("every node", "none serves, so the held-out prompts cannot be answered")
    return await pool.rollout(seat, task)
