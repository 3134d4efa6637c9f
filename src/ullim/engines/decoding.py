"""The decoding loop: who joins, one step for all who run, who leaves.

Everything here runs on the engine's worker thread, between forward passes or inside one; nothing is shared.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from ullim.engines.base import CompletionDelta
from ullim.engines.batch import LiveBatch
from ullim.engines.runner import Runner
from ullim.engines.sampler import Sampler, keyed_uniforms
from ullim.engines.sequences import Group, Row, Sink
from ullim.records import FinishReason

_FLUSH_TOKENS = 8  # a row's tokens travel in deltas of this many; handing over each one costs more than it tells


class DecodingLoop:
    """Waiting requests, running rows, and the step that moves them.

    Rows join whenever slots and cache memory are free, so a long answer never holds up the others. A request of
    many members may start some of them later than others: the prompt's cache and logits wait with it.
    """

    def __init__(self, runner: Runner, batch: LiveBatch, *, max_running: int, cache_bytes: int, version: int) -> None:
        self._runner = runner
        self._batch = batch
        self._sampler = Sampler()
        self._max_running = max_running
        self._cache_bytes = cache_bytes
        self._waiting: deque[Group] = deque()
        self._stale = False
        self.version = version
        self.generated_tokens = 0
        self.decode_steps = 0
        self.busy_s = 0.0

    @property
    def running(self) -> int:
        return len(self._batch.rows)

    @property
    def waiting(self) -> int:
        # Read from other threads: copying a deque is one uninterrupted step, walking through it is not.
        return sum(group.unstarted for group in list(self._waiting))

    @property
    def request_ids(self) -> set[str]:
        """Requests that have not ended."""
        return {g.request.request_id for g in self._live_groups()}

    def submit(self, groups: Iterable[Group]) -> None:
        self._waiting.extend(groups)

    def step(self) -> bool:
        """Let waiting members in, or, when nobody can join, give every running row one token.

        False where there was nothing to do. One step is at most one packed pass or one decoding pass (or the
        recomputation after new weights), so that pause and abort never wait long.
        """
        if not self._waiting and not self._batch.rows:
            return False
        begun = time.perf_counter()
        if self._stale:
            self._runner.recompute(self._batch)
            self._stale = False
        if not self._admit():
            self._advance(self._batch.rows, self._runner.decode(self._batch))
            self.decode_steps += 1
        self.busy_s += time.perf_counter() - begun
        return True

    def abort(self, request_ids: Iterable[str] | None) -> None:
        """End the named requests, or all of them (None), with what they have so far."""
        names = None if request_ids is None else set(request_ids)
        self._end([g for g in self._live_groups() if names is None or g.request.request_id in names])

    def drop(self, sink: Sink) -> None:
        """End what was submitted for `sink`: its reader has gone."""
        self._end([g for g in self._live_groups() if g.sink is sink])

    def flush(self) -> None:
        """Deliver every token sampled so far."""
        _deliver([(r.group.sink, r.take_delta(None)) for r in self._batch.rows if r.delivered < len(r.tokens)])

    def forget_cache(self, *, release: bool = False) -> None:
        """Nothing cached may be used again; `release` gives the memory back too."""
        self._stale = True
        if release:
            self._batch.prompts.release()
            self._batch.answers.release()

    def fail(self, error: BaseException) -> None:
        """Tell every caller that waits for tokens that there will be none."""
        for sink in {id(g.sink): g.sink for g in self._live_groups()}.values():
            sink.put(error)

    def _end(self, groups: Sequence[Group]) -> None:
        chosen = set(map(id, groups))
        rows = [row for row in self._batch.rows if id(row.group) in chosen]
        deltas: list[tuple[Sink, CompletionDelta]] = [(row.group.sink, row.take_delta("aborted")) for row in rows]
        for group in groups:
            if group.unstarted:
                unstarted = range(group.started, group.request.n)
                deltas.extend((group.sink, Row(group, member).take_delta("aborted")) for member in unstarted)
                group.started = group.request.n
                self._waiting.remove(group)
        self._batch.remove(rows)
        _deliver(deltas)

    def _live_groups(self) -> list[Group]:
        return [*self._batch.groups, *(g for g in self._waiting if g.slot < 0)]

    def _admit(self) -> bool:
        """Start waiting members where there is room, each prompt computed once per request."""
        chosen = self._choose()
        if not chosen:
            return False
        fresh = [group for group, _ in chosen if group.slot < 0]
        self._batch.add_groups(fresh)
        self._runner.prefill(self._batch, fresh)
        rows: list[Row] = []
        logits: list[torch.Tensor] = []
        for group, members in chosen:
            if group.first_logits is None:
                raise RuntimeError(f"request {group.request.request_id!r} was to start without its prompt computed")
            logits.extend([group.first_logits] * members)
            rows.extend(Row(group, group.started + i) for i in range(members))
            group.started += members
            if not group.unstarted:
                group.first_logits = None
        while self._waiting and not self._waiting[0].unstarted:
            self._waiting.popleft()
        self._batch.add_rows(rows)
        self._advance(rows, torch.stack(logits))
        return True

    def _choose(self) -> list[tuple[Group, int]]:
        """Which waiting requests may start how many members now: first come, first served.

        Bounds: free rows, one packed pass of prompt tokens, and cache memory, reckoned with the most that every row
        may still say. A request that alone exceeds the memory runs alone, since it would otherwise wait for ever.
        """
        batch = self._batch
        chosen: list[tuple[Group, int]] = []
        rows, groups, pass_tokens = len(batch.rows), len(batch.groups), 0
        prompt_length = max((len(g.prompt) for g in batch.groups), default=0)
        answer_length = max((r.group.limit for r in batch.rows), default=0)
        for group in self._waiting:
            if group.slot < 0:
                pass_tokens += len(group.prompt)
                if chosen and pass_tokens > self._runner.pass_tokens:
                    break
                groups += 1
                prompt_length = max(prompt_length, len(group.prompt))
            answer_length = max(answer_length, group.limit)
            memory = self._cache_bytes - batch.prompts.bytes_for(groups, prompt_length)
            fitting = max(memory // batch.answers.bytes_for(1, answer_length), 0 if rows else 1)
            members = min(self._max_running, fitting) - rows
            members = min(members, group.unstarted)
            if members <= 0:
                break
            chosen.append((group, members))
            rows += members
        return chosen

    def _advance(self, rows: Sequence[Row], logits: torch.Tensor) -> None:
        """Sample each row's next token and let those leave that end with it."""
        requests = [row.group.request for row in rows]
        tokens, logprobs = self._sampler.draw(
            logits,
            np.array([request.sampling.temperature for request in requests], dtype=np.float32),
            keyed_uniforms([r.group.seed for r in rows], [r.member for r in rows], [len(r.tokens) for r in rows]),
        )
        self.generated_tokens += len(rows)
        deltas: list[tuple[Sink, CompletionDelta]] = []
        ended: list[Row] = []
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            finish: FinishReason | None = row.append(token, logprob, self.version)
            if finish is not None:
                ended.append(row)
            if finish is not None or len(row.tokens) - row.delivered >= _FLUSH_TOKENS:
                deltas.append((row.group.sink, row.take_delta(finish)))
        self._batch.remove(ended)
        _deliver(deltas)


def _deliver(deltas: Iterable[tuple[Sink, CompletionDelta]]) -> None:
    """Hand deltas over, one wake-up of the caller's loop per sink."""
    by_sink: dict[int, tuple[Sink, list[CompletionDelta]]] = {}
    for sink, delta in deltas:
        by_sink.setdefault(id(sink), (sink, []))[1].append(delta)
    for sink, batch in by_sink.values():
        sink.put(list(batch))
