"""Drawing one token per row, with the log-prob it was drawn with.

`torch.multinomial` needs about 100 ms for 64 rows of a 49,152-word vocabulary on one core, as long as the whole
forward pass. Inverting the cumulative distribution with one uniform number per row needs about 5 ms, and makes
a row's draw independent of its neighbours: the number is a hash of (seed, member, step).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ullim.errors import RunFailed

_BLOCK = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def keyed_uniforms(seeds: Sequence[int], members: Sequence[int], steps: Sequence[int]) -> npt.NDArray[np.float64]:
    """A uniform number in [0, 1) for each (seed, member, step), [N], 53 random bits each.

    The finaliser is SplitMix64's (Steele, Lea, Flood 2014), applied once per part of the key.
    """
    state = _mix(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64))
    state = _mix(state ^ _mix(np.array(members, dtype=np.uint64)))
    state = _mix(state ^ _mix(np.array(steps, dtype=np.uint64) + np.uint64(0x51)))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(value: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        value = value + _GOLDEN
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class Sampler:
    """Keeps one float32 work buffer [rows, vocabulary] between steps, so that no step allocates one."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, 0)

    def draw(
        self,
        logits: torch.Tensor,
        temperatures: npt.NDArray[np.float32],
        uniforms: npt.NDArray[np.float64],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [N] and log-probs float32 [N] for logits [N, V].

        A row of temperature T>0 is drawn from softmax(logits/T) and its log-prob is of that distribution; a row of
        temperature 0 takes the most likely token, with its log-prob under softmax(logits). Non-finite logits raise
        RunFailed: nothing sampled from them means anything.
        """
        rows = len(logits)
        peak = logits.amax(-1, keepdim=True).float()
        divisors = torch.from_numpy(np.where(temperatures == 0, np.float32(1.0), temperatures)).to(logits.device)
        weights = self._weights(logits, peak, divisors)
        blocks = weights.view(rows, -1, _BLOCK)
        cumulative = blocks.sum(-1, dtype=torch.float32).double().cumsum(-1)  # [N, blocks]
        total = cumulative[:, -1]
        if not bool(torch.isfinite(total).all()):
            raise RunFailed("the model gave non-finite logits; its weights are broken or overflow in this dtype")
        threshold = torch.from_numpy(uniforms).to(logits.device) * total
        block = _first_above(cumulative, threshold)
        before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        within = blocks[torch.arange(rows, device=logits.device), block].double().cumsum(-1)  # [N, _BLOCK]
        tokens = block * _BLOCK + _first_above(within, threshold - before)
        greedy = torch.from_numpy(temperatures == 0)
        if bool(greedy.any()):
            greedy = greedy.to(logits.device)
            tokens[greedy] = logits[greedy].argmax(-1)
        # From the logit, not from its weight: the smallest weights are denormal and have lost their digits.
        drawn = (logits.gather(1, tokens[:, None]).float() - peak)[:, 0] / divisors
        return tokens, drawn - total.log().float()

    def _weights(self, logits: torch.Tensor, peak: torch.Tensor, divisors: torch.Tensor) -> torch.Tensor:
        """exp((logits − peak)/divisors) in float32, [N, V rounded up to whole blocks], 0 beyond the vocabulary."""
        rows, vocabulary = logits.shape
        width = -(-vocabulary // _BLOCK) * _BLOCK
        if self._buffer.shape[0] < rows or self._buffer.shape[1] != width or self._buffer.device != logits.device:
            self._buffer = torch.zeros(rows, width, device=logits.device)
        full = self._buffer[:rows]
        weights = full[:, :vocabulary]
        torch.sub(logits, peak, out=weights)
        if bool((divisors != 1.0).any()):
            weights.div_(divisors[:, None])
        weights.exp_()
        return full


def _first_above(cumulative: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    """Index [N] of the first entry of each row above the threshold; never one of weight zero.

    Rounding can push a threshold to the row's very end, behind which only zero weights may follow: the answer is
    then the last entry that still raised the sum.
    """
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    return torch.minimum(torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0], last)
