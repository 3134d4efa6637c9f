"""What a generation engine is.

An engine takes token ids and gives back token ids, each with the log-prob it was sampled with and the policy
version that produced it. Any class with these methods works; `tests/conformance/engine.py` says what they
must do.

A generation request moves through named states, and only the engine moves it::

    WAITING --slot free--> RUNNING --stop / length--> FINISHED
       |                      |
       |                      +--pause("keep")/resume--> RUNNING  (later tokens carry the newer version)
       +------ abort / pause("abort") ----------------> ABORTED   (finish="aborted", tokens so far delivered)
"""

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from ullim.records import FinishReason, FloatArray, IntArray
from ullim.weights.manifest import WeightManifest
from ullim.weights.transport import Receiver

PauseMode = Literal["keep", "abort"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Only what keeps log-probs exact: temperature, no truncation of the distribution.

    `temperature=0` is greedy and for evaluation only; its log-probs are those of the untempered distribution.
    `stop_strings` end an answer as soon as the decoded text holds one of them; the tokens stay as sampled.
    """

    temperature: float = 1.0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """`n` answers to one prompt. `request_id` is the caller's and comes back in every delta."""

    request_id: str
    prompt_ids: IntArray  # [P]
    n: int
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """Tokens that one member of one request gained. The last delta of a member, and only it, has `finish`."""

    request_id: str
    member: int  # 0 .. n-1
    token_ids: IntArray  # [k], k >= 0 (0 only together with finish)
    logprobs: FloatArray  # [k]
    versions: IntArray  # [k]
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What a node reports of its engine: counts of sequences, tokens since start, busy seconds since start."""

    running: int
    waiting: int
    generated_tokens: int
    busy_s: float


@runtime_checkable
class Engine(Protocol):
    """A generation engine. Methods may be called from one asyncio loop; none blocks it for long."""

    @property
    def version(self) -> int:
        """Policy version of the weights in use; rises only after a transfer has succeeded."""
        ...

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[CompletionDelta]:
        """Stream the deltas of all members of `requests`, interleaved, until each has finished.

        Closing the iterator early aborts what is left. A prompt with no room for one new token in the
        context raises BadInput.
        """
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End the named requests; their members deliver `finish="aborted"`. Unknown ids are ignored."""
        ...

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Return once no forward pass is running. `keep` freezes running requests, `abort` ends them."""
        ...

    async def resume(self) -> None:
        """Go on where `pause` stopped. Without a pause it does nothing."""
        ...

    async def receive_weights(self, manifest: WeightManifest, receiver: Receiver, version: int) -> None:
        """Take one full set of weights and become `version`. Only while paused (RuntimeError otherwise).

        Running requests go on under the new weights with their cache recomputed; nothing cached under the
        old weights survives. If the stream fails anywhere the engine keeps its old weights and version, and
        the error is raised.
        """
        ...

    async def sleep(self) -> None:
        """Give up caches and, where the engine can, device memory, until `wake`. Only while paused."""
        ...

    async def wake(self) -> None:
        """Undo `sleep`."""
        ...

    async def probe(self, sequences: Sequence[tuple[IntArray, IntArray]], temperature: float) -> list[FloatArray]:
        """Log-probs [L] of each (prompt ids [P], completion ids [L]) under the current weights."""
        ...

    def load(self) -> EngineLoad:
        """Counters for balance and utilisation."""
        ...

    async def close(self) -> None:
        """End all work and free everything. Later calls raise RuntimeError."""
        ...
