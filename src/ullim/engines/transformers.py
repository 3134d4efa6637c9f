"""The embedded engine: any Hugging Face causal LM, generating inside this process.

It needs no server, no compiler and no GPU, takes new weights in the middle of answers, and keeps one core busy:
rows join and leave between steps, nothing is padded, a prompt is computed and kept once for all its answers.
`docs/decisions/embedded-engine.md` says why it exists beside transformers' own batching.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ullim.engines.base import CompletionDelta, EngineLoad, GenerationRequest, PauseMode
from ullim.engines.batch import LiveBatch
from ullim.engines.decoding import DecodingLoop
from ullim.engines.intake import WeightIntake
from ullim.engines.kvcache import SlotStore
from ullim.engines.prepacked import PackedLinears
from ullim.engines.requests import RequestRules
from ullim.engines.runner import Runner
from ullim.engines.sequences import Sink
from ullim.engines.suitability import check_suitable
from ullim.engines.worker import Worker
from ullim.errors import BadInput, RunFailed
from ullim.records import FloatArray, IntArray
from ullim.weights.manifest import WeightManifest
from ullim.weights.transport import Receiver


class EngineOptions(TypedDict, total=False):
    """What both ways of making an engine take."""

    max_running: int
    """Answers generated at once; more wait. Default 64."""
    max_context: int | None
    """Tokens of prompt and answer together. Default: the model's positions."""
    cache_bytes: int
    """Most memory for keys and values, 2 GiB by default; a single request that needs more runs alone."""
    pass_tokens: int
    """Most tokens of one pass over prompts, 1024 by default: bounds its memory and how long a pause may wait."""
    threads: int | None
    """torch's thread count for this process; None leaves it as it is."""
    seed: int
    """For requests without a seed of their own. Default 0."""
    version: int
    """Policy version of the weights loaded. Default 0."""
    deadline_s: float
    """Longest wait for the worker to take a command, 300 s by default."""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What the engine has done since its start, for benchmarks: tokens through packed passes, decoding steps."""

    prompt_tokens: int
    decode_steps: int
    generated_tokens: int


class TransformersEngine:
    """`Engine` over a Hugging Face model. See `ullim.engines.base.Engine` for what the methods promise."""

    def __init__(
        self,
        model_path: Path | str,
        *,
        dtype: str = "bfloat16",
        device: str = "cpu",
        **options: Unpack[EngineOptions],
    ) -> None:
        """Load a model folder (weights, config, tokenizer). BadInput for a folder or a model that cannot be used."""
        if dtype not in ("bfloat16", "float32", "float16"):
            raise BadInput(f"dtype: {dtype!r}; choose bfloat16, float16 or float32")
        if not Path(model_path).is_dir():
            raise BadInput(f"model_path: {str(model_path)!r} is not a folder with a Hugging Face model")
        try:
            model = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, dtype), local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise BadInput(f"model_path: {str(model_path)!r} cannot be loaded: {error}") from error
        self._start(model.to(device), tokenizer, **options)

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any | None, **options: Unpack[EngineOptions]) -> "TransformersEngine":
        """An engine over a loaded model, which it owns from here on. Without a tokenizer stop strings are refused."""
        engine = cls.__new__(cls)
        engine._start(model, tokenizer, **options)
        return engine

    def _start(
        self,
        model: Any,
        tokenizer: Any | None,
        *,
        max_running: int = 64,
        max_context: int | None = None,
        cache_bytes: int = 2 * 1024**3,
        pass_tokens: int = 1024,
        threads: int | None = None,
        seed: int = 0,
        version: int = 0,
        deadline_s: float = 300.0,
    ) -> None:
        if max_running < 1:
            raise BadInput(f"max_running: {max_running}; at least one answer must run at a time")
        model.eval().requires_grad_(False)
        config = model.config.get_text_config()
        context = max_context or int(config.max_position_embeddings)
        shapes = check_suitable(model, max_context=context, device=model.device)
        self._tokenizer = tokenizer
        self._rules = RequestRules(model, tokenizer, max_context=context, seed=seed)
        self._intake = WeightIntake(model)
        self._packed = PackedLinears(model)
        self._runner = Runner(model, device=model.device, pass_tokens=pass_tokens)
        prompts, answers = (
            SlotStore(shapes, dtype=model.dtype, device=model.device, budget_bytes=cache_bytes // 2) for _ in range(2)
        )
        self._loop = DecodingLoop(
            self._runner,
            LiveBatch(prompts, answers, model.device),
            max_running=max_running,
            cache_bytes=cache_bytes,
            version=version,
        )
        self._threads = threads
        self._paused = False
        self._asleep = False
        self._worker = Worker(
            "ullim-engine",
            session=self._session,
            step=self._step,
            on_failure=self._loop.fail,
            deadline_s=deadline_s,
        )

    @property
    def version(self) -> int:
        return self._loop.version

    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[CompletionDelta]:
        """See `Engine.generate`. Requests are checked at once, and start with the first delta asked for."""
        self._rules.check(requests)
        return self._stream(list(requests))

    async def _stream(self, requests: list[GenerationRequest]) -> AsyncIterator[CompletionDelta]:
        sink = Sink(asyncio.get_running_loop())
        unfinished = sum(request.n for request in requests)
        try:
            await self._worker.call(lambda: self._submit(requests, sink), "generate")
            while unfinished:
                item = await sink.queue.get()
                if isinstance(item, BaseException):
                    raise item
                for delta in item:
                    unfinished -= delta.finish is not None
                    yield delta
        finally:
            sink.closed = True
            if unfinished and not self._worker.ended:
                self._worker.post(lambda: self._loop.drop(sink))

    async def abort(self, request_ids: Sequence[str]) -> None:
        names = list(request_ids)
        await self._worker.call(lambda: self._loop.abort(names), "abort")

    async def pause(self, mode: PauseMode = "keep") -> None:
        if mode not in ("keep", "abort"):
            raise BadInput(f"pause mode: {mode!r}; choose 'keep' or 'abort'")

        def command() -> None:
            self._paused = True
            if mode == "abort":
                self._loop.abort(None)
            self._loop.flush()

        await self._worker.call(command, "pause")

    async def resume(self) -> None:
        def command() -> None:
            if self._asleep:
                raise RuntimeError("embedded engine: asleep; wake() before resume()")
            self._paused = False

        await self._worker.call(command, "resume")

    async def receive_weights(self, manifest: WeightManifest, receiver: Receiver, version: int) -> None:
        def command() -> None:
            self._require_pause("receive_weights")
            if version < self.version:
                raise BadInput(f"version: {version} is older than the engine's {self.version}; versions only rise")
            self._intake.apply(manifest, self._intake.stage(manifest, receiver))
            if not self._asleep:
                self._packed.pack()
            self._loop.forget_cache()
            self._loop.version = version

        # The receiver keeps the deadlines of a transfer; how long a healthy one takes is not ours to say.
        await self._worker.call(command, "receive_weights", bounded=False)

    async def sleep(self) -> None:
        def command() -> None:
            self._require_pause("sleep")
            self._asleep = True
            self._packed.unpack()
            self._loop.forget_cache(release=True)

        await self._worker.call(command, "sleep")

    async def wake(self) -> None:
        def command() -> None:
            if self._asleep:
                self._packed.pack()
                self._asleep = False

        await self._worker.call(command, "wake")

    async def probe(self, sequences: Sequence[tuple[IntArray, IntArray]], temperature: float) -> list[FloatArray]:
        pairs = self._rules.check_probe(sequences, temperature)
        return await self._worker.call(lambda: self._runner.score(pairs, temperature), "probe")

    def load(self) -> EngineLoad:
        """See `Engine.load`. Raises RunFailed if the worker has died, so that a supervisor learns of it."""
        if self._worker.failure is not None:
            raise RunFailed(f"embedded engine: the worker died of {self._worker.failure!r}") from self._worker.failure
        loop = self._loop
        return EngineLoad(loop.running, loop.waiting, loop.generated_tokens, loop.busy_s)

    def counters(self) -> EngineCounters:
        """Work done since the start."""
        return EngineCounters(self._runner.passed_tokens, self._loop.decode_steps, self._loop.generated_tokens)

    async def close(self) -> None:
        await self._worker.close()

    @contextmanager
    def _session(self) -> Iterator[None]:
        """What holds on the worker thread from its beginning to its end: torch keeps these settings per thread."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            self._packed.pack()
            yield

    def _step(self) -> bool:
        return not self._paused and self._loop.step()

    def _submit(self, requests: Sequence[GenerationRequest], sink: Sink) -> None:
        self._loop.submit(self._rules.groups(requests, sink, self._loop.request_ids))

    def _require_pause(self, what: str) -> None:
        if not self._paused:
            raise RuntimeError(f"embedded engine: {what} needs a paused engine; call pause() first")
