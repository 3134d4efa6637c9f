"""From the deltas of one member to its Completion."""

from collections.abc import Callable, Sequence

import numpy as np

from ullim.engines.base import CompletionDelta
from ullim.records import Completion


def join_deltas(deltas: Sequence[CompletionDelta], decode: Callable[[list[int]], str]) -> Completion:
    """All deltas of one member in the order they came; the last one, and only it, has `finish`.

    `decode` turns token ids into text without special tokens. Raises RuntimeError on a stream that ended early:
    an answer that merely looks complete must never be trained on as such.
    """
    *earlier, last = deltas
    if last.finish is None or any(delta.finish is not None for delta in earlier):
        raise RuntimeError(f"request {last.request_id}, member {last.member}: the engine's stream broke off")
    token_ids = np.concatenate([delta.token_ids for delta in deltas]).astype(np.int32, copy=False)
    return Completion(
        token_ids=token_ids,
        logprobs=np.concatenate([delta.logprobs for delta in deltas]).astype(np.float32, copy=False),
        versions=np.concatenate([delta.versions for delta in deltas]).astype(np.int32, copy=False),
        finish=last.finish,
        text=decode(token_ids.tolist()),
    )
