"""What the engine remembers of each request and of each of its answers."""

import asyncio
from dataclasses import dataclass, field

import numpy as np
import torch

from ullim.engines.base import CompletionDelta, GenerationRequest
from ullim.engines.stopping import StopRule
from ullim.records import FinishReason

StreamItem = list[CompletionDelta] | BaseException


class Sink:
    """Where the worker thread puts the deltas of one `generate` call; safe to use from that thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: asyncio.Queue[StreamItem] = asyncio.Queue()
        self.closed = False

    def put(self, item: StreamItem) -> None:
        if self.closed:
            return
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:  # the caller's event loop is gone: nobody is left to read, and the engine must live on
            self.closed = True


@dataclass(slots=True, eq=False)
class Group:
    """One request: its prompt, and how many of its `n` members have started and ended.

    `slot` is its place in the prompt store, -1 while no member has started. `first_logits` [V] are kept until
    the last member has drawn its first token.
    """

    request: GenerationRequest
    sink: Sink
    prompt: list[int]
    stop: StopRule
    seed: int
    limit: int  # most new tokens a member may have
    started: int = 0
    running: int = 0
    slot: int = -1
    first_logits: torch.Tensor | None = None

    @property
    def unstarted(self) -> int:
        return self.request.n - self.started


@dataclass(slots=True, eq=False)
class Row:
    """One running answer. All tokens but the newest are in the answer store; `delivered` of them were sent out."""

    group: Group
    member: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    delivered: int = 0

    def append(self, token: int, logprob: float, version: int) -> FinishReason | None:
        """Take a new token and say whether the answer ends with it."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if self.group.stop.reached(self.tokens):
            return "stop"
        return "length" if len(self.tokens) >= self.group.limit else None

    def take_delta(self, finish: FinishReason | None) -> CompletionDelta:
        """The tokens not yet delivered, marked as delivered."""
        fresh = slice(self.delivered, len(self.tokens))
        self.delivered = len(self.tokens)
        return CompletionDelta(
            request_id=self.group.request.request_id,
            member=self.member,
            token_ids=np.array(self.tokens[fresh], dtype=np.int32),
            logprobs=np.array(self.logprobs[fresh], dtype=np.float32),
            versions=np.array(self.versions[fresh], dtype=np.int32),
            finish=finish,
        )
