"""What may be asked of the embedded engine, and how a request becomes a group."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ullim.engines.base import GenerationRequest, Sampling
from ullim.engines.sequences import Group, Sink
from ullim.engines.stopping import StopRule
from ullim.errors import BadInput
from ullim.records import IntArray


class RequestRules:
    """The limits of one engine: context, vocabulary, its own stop tokens, seeds for requests without one."""

    def __init__(self, model: Any, tokenizer: Any | None, *, max_context: int, seed: int) -> None:
        self._max_context = max_context
        self._vocabulary = int(model.config.get_text_config().vocab_size)
        self._tokenizer = tokenizer
        self._eos = _eos_ids(model)
        self._seed = seed
        self._arrivals = itertools.count()

    def check(self, requests: Sequence[GenerationRequest]) -> None:
        """Raise BadInput naming the request and the field that cannot be served."""
        names = [request.request_id for request in requests]
        if len(set(names)) != len(names):
            raise BadInput("request_id: each request of one call needs an id of its own")
        for request in requests:
            where = f"request {request.request_id!r}"
            if request.n < 1:
                raise BadInput(f"{where}: n is {request.n}; ask for at least one answer")
            self._check_prompt(request.prompt_ids, where)
            if len(request.prompt_ids) >= self._max_context:
                raise BadInput(
                    f"{where}: prompt of {len(request.prompt_ids)} tokens leaves no room for an answer in a context of "
                    f"{self._max_context}; shorten it or raise max_context"
                )
            self._check_sampling(request.sampling, where)

    def check_probe(
        self, sequences: Sequence[tuple[IntArray, IntArray]], temperature: float
    ) -> list[tuple[list[int], list[int]]]:
        """The sequences as lists; BadInput if one cannot be scored."""
        if not (math.isfinite(temperature) and temperature >= 0):
            raise BadInput(f"probe: temperature is {temperature}; it must be a finite number of at least 0")
        pairs: list[tuple[list[int], list[int]]] = []
        for index, (prompt, completion) in enumerate(sequences):
            where = f"probe sequence {index}"
            self._check_prompt(prompt, where)
            if len(completion):
                self._check_ids(completion, where)
            if len(prompt) + len(completion) > self._max_context:
                raise BadInput(
                    f"{where}: {len(prompt)} + {len(completion)} tokens, the context holds {self._max_context}"
                )
            pairs.append((np.asarray(prompt).tolist(), np.asarray(completion).tolist()))
        return pairs

    def groups(self, requests: Sequence[GenerationRequest], sink: Sink, live: set[str]) -> list[Group]:
        """A group per request; `live` are the ids already at work, which may not be used twice."""
        for request in requests:
            if request.request_id in live:
                raise BadInput(f"request {request.request_id!r}: a request of this id is still running")
        return [self._group(request, sink) for request in requests]

    def _group(self, request: GenerationRequest, sink: Sink) -> Group:
        sampling = request.sampling
        arrival = next(self._arrivals)
        return Group(
            request=request,
            sink=sink,
            prompt=np.asarray(request.prompt_ids).tolist(),
            stop=StopRule(sampling.stop_token_ids or self._eos, sampling.stop_strings, self._tokenizer),
            # Without a seed of its own a request gets one of the engine's, another for every arrival.
            seed=sampling.seed if sampling.seed is not None else (self._seed << 40) + arrival + (1 << 63),
            limit=min(sampling.max_new_tokens, self._max_context - len(request.prompt_ids)),
        )

    def _check_prompt(self, ids: IntArray, where: str) -> None:
        if not len(ids):
            raise BadInput(f"{where}: the prompt is empty; at least one token is needed to continue from")
        self._check_ids(ids, where)

    def _check_ids(self, ids: IntArray, where: str) -> None:
        low, high = int(np.min(ids)), int(np.max(ids))
        if low < 0 or high >= self._vocabulary:
            raise BadInput(f"{where}: token ids from {low} to {high}, the model knows 0 to {self._vocabulary - 1}")

    def _check_sampling(self, sampling: Sampling, where: str) -> None:
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            raise BadInput(f"{where}: temperature is {sampling.temperature}; it must be a finite number of at least 0")
        if sampling.max_new_tokens < 1:
            raise BadInput(f"{where}: max_new_tokens is {sampling.max_new_tokens}; it must be at least 1")
        if sampling.stop_strings and self._tokenizer is None:
            raise BadInput(f"{where}: stop_strings need a tokenizer, and this engine was made without one")
        if any(not string for string in sampling.stop_strings):
            raise BadInput(f"{where}: stop_strings holds an empty string, which would end every answer at once")


def _eos_ids(model: Any) -> tuple[int, ...]:
    """The model's own stop tokens: of its generation config, else of its config."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(), "eos_token_id", None)
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, (list, tuple)) else (int(ids),)
