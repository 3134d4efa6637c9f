"""Numbers that combine exactly over micro-batches and ranks.

A mean of means is wrong as soon as micro-batches differ in size, and a percentile of percentiles means nothing. So
every diagnostic first becomes a `Tally`: sums, counts, maxima and one histogram in a flat float64 vector of fixed
layout. Tallies merge by addition and maximum, ranks all-reduce the two halves of the vector, and only then are numbers
made of it. It stays on the device of its tensors, so nothing waits for a GPU before `finalise`.

    vector = tally.to_vector()
    all_reduce(vector[: Tally.sums], SUM); all_reduce(vector[Tally.sums :], MAX)
    metrics = Tally.from_vector(vector).finalise()
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

SUM_NAMES = (
    *("mismatch_tokens", "mismatch_missing", "mismatch_k1", "mismatch_k3", "mismatch_difference"),
    *("weight_tokens", "weight", "weight_square", "raw", "raw_square", "capped"),
    *("ratio_tokens", "ratio", "clipped_low", "clipped_high", "dual_clipped"),
    *("entropy_tokens", "entropy", "reference_tokens", "reference_kl"),
    *("loss_parts", "loss_policy", "loss_kl", "loss_entropy"),
)
MAX_NAMES = ("prob_difference", "raw_max", "ratio_max")  # none is ever negative, so an empty tally holds 0

SMALLEST_DIFFERENCE, LARGEST_DIFFERENCE = 1e-6, 1e2
BINS_PER_DECADE = 64
BINS = round(BINS_PER_DECADE * math.log10(LARGEST_DIFFERENCE / SMALLEST_DIFFERENCE)) + 2  # below, 512 bins, above


def difference_histogram(differences: Tensor) -> Tensor:
    """Counts of |differences| [M] in log-spaced bins: float64 [`BINS`].

    Bin 0 holds what is below 1e-6, the last what is 100 or more, or NaN; a bin between is 3.7 % wide.
    """
    # A NaN of a broken learner must not become an index out of range: the step is to be skipped, not to crash here.
    decades = torch.log10(differences.double().nan_to_num(nan=torch.inf) / SMALLEST_DIFFERENCE)
    place = (decades * BINS_PER_DECADE).floor().clamp(-1, BINS - 2).long() + 1
    return torch.zeros(BINS, dtype=torch.float64, device=differences.device).index_add(
        0, place, torch.ones_like(decades)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """Sufficient statistics of the step's diagnostics. Build with `Tally.of`, combine with `merge`."""

    vector: Tensor  # float64 [sums + maxima]: SUM_NAMES, then the histogram, then MAX_NAMES

    sums: ClassVar[int] = len(SUM_NAMES) + BINS
    """Length of the leading part of the vector that adds up; the rest combines by maximum."""
    size: ClassVar[int] = sums + len(MAX_NAMES)

    @classmethod
    def empty(cls, device: torch.device | str = "cpu") -> "Tally":
        """The neutral element of `merge`."""
        return cls(torch.zeros(cls.size, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, values: Mapping[str, Tensor], histogram: Tensor | None = None) -> "Tally":
        """A tally of the given scalars by name (`SUM_NAMES`, `MAX_NAMES`); the rest is 0. Unknown name: KeyError."""
        first = next(iter(values.values()))
        tally = cls.empty(first.device)
        for name, value in values.items():
            tally.vector[_PLACES[name]] = value.detach().double()
        if histogram is not None:
            tally.vector[len(SUM_NAMES) : cls.sums] = histogram
        return tally

    def merge(self, *others: "Tally") -> "Tally":
        """The tally of everything that went into these; exact for counts and maxima, float64 rounding for sums."""
        vectors = torch.stack([tally.vector for tally in (self, *others)])
        return Tally(torch.cat([vectors[:, : self.sums].sum(dim=0), vectors[:, self.sums :].amax(dim=0)]))

    @classmethod
    def merge_all(cls, tallies: Iterable["Tally"]) -> "Tally":
        """`merge` of any number of tallies; none: empty."""
        found = list(tallies)
        return found[0].merge(*found[1:]) if found else cls.empty()

    def to_vector(self) -> Tensor:
        """A copy of the float64 vector [`size`], to be all-reduced in two parts at `Tally.sums`."""
        return self.vector.clone()

    @classmethod
    def from_vector(cls, vector: Tensor) -> "Tally":
        """The tally that such a vector describes; ValueError for another length or dtype."""
        if vector.shape != (cls.size,) or vector.dtype != torch.float64:
            raise ValueError(f"a tally is float64 [{cls.size}], got {vector.dtype} {tuple(vector.shape)}")
        return cls(vector.clone())

    def __getitem__(self, name: str) -> float:
        """One statistic by name, as a number (waits for the device)."""
        return float(self.vector[_PLACES[name]])

    def finalise(self) -> dict[str, float]:
        """The metrics, by logged name (docs/objective.md). A group that nothing was tallied for is absent, not 0."""
        host = Tally(self.vector.cpu())
        return host._mismatch() | host._correction() | host._ratio() | host._policy()

    def _mismatch(self) -> dict[str, float]:
        tokens, missing = self["mismatch_tokens"], self["mismatch_missing"]
        if tokens + missing == 0:
            return {}
        numbers = {"mismatch/missing_tokens": missing, "mismatch/missing_fraction": missing / (tokens + missing)}
        if tokens == 0:
            return numbers
        return numbers | {
            "mismatch/k1": self["mismatch_k1"] / tokens,
            "mismatch/k3": self["mismatch_k3"] / tokens,
            "mismatch/logprob_diff_mean": self["mismatch_difference"] / tokens,
            "mismatch/logprob_diff_p99": self._difference_quantile(0.99),
            "mismatch/max_prob_diff": self["prob_difference"],
        }

    def _correction(self) -> dict[str, float]:
        tokens = self["weight_tokens"]
        if tokens == 0:
            return {}
        return {
            "correction/weight_mean": self["weight"] / tokens,
            "correction/weight_mean_raw": self["raw"] / tokens,
            "correction/weight_max_raw": self["raw_max"],
            "correction/capped_fraction": self["capped"] / tokens,
            "correction/ess": _effective_share(self["weight"], self["weight_square"], tokens),
            "correction/ess_raw": _effective_share(self["raw"], self["raw_square"], tokens),
        }

    def _ratio(self) -> dict[str, float]:
        tokens = self["ratio_tokens"]
        if tokens == 0:
            return {}
        return {
            "ratio/mean": self["ratio"] / tokens,
            "ratio/max": self["ratio_max"],
            "ratio/clip_low_fraction": self["clipped_low"] / tokens,
            "ratio/clip_high_fraction": self["clipped_high"] / tokens,
            "ratio/dual_clip_fraction": self["dual_clipped"] / tokens,
        }

    def _policy(self) -> dict[str, float]:
        numbers: dict[str, float] = {}
        if tokens := self["entropy_tokens"]:
            numbers["entropy"] = self["entropy"] / tokens
        if tokens := self["reference_tokens"]:
            numbers["kl/reference"] = self["reference_kl"] / tokens
        if self["loss_parts"]:
            numbers |= {f"loss/{part}": self[f"loss_{part}"] for part in ("policy", "kl", "entropy")}
        return numbers

    def _difference_quantile(self, share: float) -> float:
        """Upper edge of the bin in which `share` of the tokens is reached: at most one bin (3.7 %) too high."""
        counts = self.vector[len(SUM_NAMES) : self.sums]
        reached = torch.cumsum(counts, dim=0) >= share * counts.sum()
        place = int(reached.int().argmax())
        if place == 0:
            return 0.0
        return LARGEST_DIFFERENCE if place == BINS - 1 else SMALLEST_DIFFERENCE * 10 ** (place / BINS_PER_DECADE)


def _effective_share(total: float, squares: float, count: float) -> float:
    """(Σw)² / (N Σw²): 1 for equal weights, 1/N where one weight is everything, 0 where none is left."""
    return total * total / (count * squares) if squares > 0 else 0.0


_PLACES = {name: place for place, name in enumerate(SUM_NAMES)} | {
    name: Tally.sums + place for place, name in enumerate(MAX_NAMES)
}
