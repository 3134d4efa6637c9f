"""A frozen sequence-classification model as a channel: its raw logit is the score.

Groups arrive from the event loop as they finish; one worker thread renders them, joins what arrived within a few
milliseconds, sorts by length and runs the forward passes::

    score() ──job──▶ queue ──▶ worker: gather ▶ render ▶ length-sorted batches ▶ logits ──▶ the jobs' futures

Weights are float32, so that an answer's score is the same (to rounding) whatever it was batched with.
"""

import asyncio
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from ullim.errors import BadInput, RunFailed
from ullim.records import Completion, Message, Prompt, Score
from ullim.rewards.rendering import RewardTemplate, load_template, render

_GATHER_S = 0.005
_Pair = tuple[tuple[Message, ...], str]


class RewardScorer:
    """A reward model and its tokenizer: raw logits of (conversation, answer) pairs. Not thread-safe."""

    def __init__(
        self, folder: Path, *, key: str, max_tokens: int, batch_size: int = 32, device: str | torch.device = "cpu"
    ) -> None:
        """Load `folder`; `key` (the recipe's) is named in BadInput where it is not a usable reward model."""
        self._model, self._tokenizer = _load(folder, key)
        self._model.to(device).eval()
        self._device = torch.device(device)
        self._batch_size = batch_size
        self.template: RewardTemplate = load_template(folder, self._tokenizer)
        limits = [max_tokens, self.template.max_tokens, getattr(self._model.config, "max_position_embeddings", None)]
        self.max_tokens = min(limit for limit in limits if limit is not None)

    def score(self, pairs: Sequence[_Pair]) -> list[Score]:
        """One Score per pair, in order; None where the answer does not fit or the logit is not finite."""
        rendered = [
            render(self.template, messages, answer, self._tokenizer, max_tokens=self.max_tokens)
            for messages, answer in pairs
        ]
        scores = [Score(None, f"the answer alone is longer than {self.max_tokens} tokens")] * len(pairs)
        order = sorted((i for i, r in enumerate(rendered) if r), key=lambda i: len((rendered[i] or {})["input_ids"]))
        for start in range(0, len(order), self._batch_size):
            members = order[start : start + self._batch_size]
            logits = self._logits([rendered[i] or {} for i in members])
            for i, logit in zip(members, logits, strict=True):
                scores[i] = Score(logit) if isfinite(logit) else Score(None, f"the reward model gave {logit}")
        return scores

    @torch.inference_mode()
    def _logits(self, rendered: list[dict[str, list[int]]]) -> list[float]:
        batch = self._tokenizer.pad(rendered, padding=True, padding_side="right", return_tensors="pt")
        logits: list[float] = self._model(**batch.to(self._device)).logits[:, 0].float().tolist()
        return logits


def _load(folder: Path, key: str) -> tuple[Any, Any]:
    """Model and tokenizer from `folder`, checked to be a trained reward model in safetensors."""
    if not (folder / "config.json").is_file():
        raise BadInput(f"{key}: {folder} is not a Hugging Face model folder (no config.json)")
    if not any(folder.glob("*.safetensors")):
        raise BadInput(f"{key}: {folder} holds no *.safetensors; other formats run code when opened and are not read")
    try:
        labels = AutoConfig.from_pretrained(folder, local_files_only=True).num_labels
        if labels != 1:
            raise BadInput(f"{key}: {folder} has {labels} labels; a reward model has one (num_labels = 1)")
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise BadInput(f"{key}: {folder} cannot be loaded as a sequence classifier: {error}") from error
    # transformers fills what a checkpoint lacks with random numbers and only warns; such a head would be noise.
    if info["missing_keys"]:
        missing = ", ".join(sorted(info["missing_keys"])[:4])
        raise BadInput(f"{key}: {folder} lacks the weights {missing}: it is not a trained reward model")
    if model.config.pad_token_id is None:
        # Decoder classifiers find the last token by the pad id and refuse batches without one.
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


@dataclass(frozen=True, slots=True)
class _Job:
    pairs: list[_Pair]
    scores: "Future[list[Score]]"


class ModelChannel:
    """Scores with a `RewardScorer` in a thread of its own, so that the event loop never waits for a forward pass."""

    def __init__(
        self, name: str, scorer: RewardScorer, *, threads: int | None = None, deadline_s: float = 600.0
    ) -> None:
        """`threads`: torch threads of the worker (None: torch's choice). `deadline_s`: longest wait for one group."""
        self.name = name
        self._scorer = scorer
        self._threads = threads
        self._deadline_s = deadline_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._closed = False
        self._worker = threading.Thread(target=self._work, name=f"reward-{name}", daemon=True)
        self._worker.start()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        if self._closed:
            raise RuntimeError(f"reward channel {self.name} is closed")
        whole = [i for i, completion in enumerate(completions) if completion.finish != "aborted"]
        scores = [Score(None, "aborted before its end")] * len(completions)
        if whole:
            job = _Job([(prompt.messages, completions[i].text) for i in whole], Future())
            self._jobs.put(job)
            waiter = asyncio.wrap_future(job.scores)
            try:
                done, _ = await asyncio.wait({waiter}, timeout=self._deadline_s)
            finally:
                waiter.cancel()  # a group given up while it queues is not scored; where it is done this does nothing
            if not done:
                raise RunFailed(f"rewards.{self.name}: the reward model gave nothing within {self._deadline_s:g} s")
            for i, score in zip(whole, waiter.result(), strict=True):
                scores[i] = score
        return scores

    async def close(self) -> None:
        """End the worker after the job it is at; later calls raise RuntimeError."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            await asyncio.to_thread(self._worker.join, self._deadline_s)

    def _work(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        while True:
            jobs, last = self._gather()
            if jobs:
                self._answer(jobs)
            if last:
                return

    def _gather(self) -> tuple[list[_Job], bool]:
        """The jobs of one round: the first to come, and what else comes shortly after. True where it is the last."""
        jobs: list[_Job] = []
        end = 0.0
        while True:
            try:
                job = self._jobs.get(timeout=max(0.0, end - time.monotonic())) if jobs else self._jobs.get()
            except queue.Empty:
                return jobs, False
            if job is None:
                return jobs, True
            if not jobs:
                end = time.monotonic() + _GATHER_S
            if job.scores.set_running_or_notify_cancel():  # its group may have been given up meanwhile
                jobs.append(job)

    def _answer(self, jobs: list[_Job]) -> None:
        try:
            scores = iter(self._scorer.score([pair for job in jobs for pair in job.pairs]))
        except BaseException as error:  # every waiter is told, or it would wait until its deadline
            for job in jobs:
                job.scores.set_exception(error)
            return
        for job in jobs:
            job.scores.set_result([next(scores) for _ in job.pairs])
