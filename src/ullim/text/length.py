"""How long an answer is: one definition for rewards, guardrails and reports.

Tokens are what the engine sampled, the stop token included, so that a reward's length is the learner's. Characters
are what a reader would count: the text in NFC (so that Hangul typed as jamo counts as syllables), without the code
points that only modify the one before them. This follows the extended grapheme clusters of Unicode Annex 29 for
everyday text (accents, Indic vowel signs, emoji with skin tones, joined emoji, flags) without its full tables;
Hangul jamo that no syllable holds (Old Korean) count one each. Spaces and line breaks count.
"""

import unicodedata
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_ZERO_WIDTH_JOINER = "\u200d"
_ATTACHED_CATEGORIES = frozenset({"Mn", "Me", "Mc"})


def count_characters(text: str) -> int:
    """Reader's characters of `text`; at most its number of code points, 0 only for the empty string."""
    text = unicodedata.normalize("NFC", text)
    if text.isascii():
        return len(text) - text.count("\r\n")
    count = 0
    previous = ""
    flag_half_open = False  # two regional indicators make one flag
    for character in text:
        regional = "\U0001f1e6" <= character <= "\U0001f1ff"
        attached = bool(previous) and (
            _attaches(character)
            or (previous == _ZERO_WIDTH_JOINER and unicodedata.category(character) == "So")
            or (previous == "\r" and character == "\n")
            or (regional and flag_half_open)
        )
        flag_half_open = regional and not attached
        count += not attached
        previous = character
    return count


def _attaches(character: str) -> bool:
    return (
        character in (_ZERO_WIDTH_JOINER, "\u200c")
        or "\U0001f3fb" <= character <= "\U0001f3ff"  # skin tones
        or "\U000e0020" <= character <= "\U000e007f"  # tags of regional flags
        or unicodedata.category(character) in _ATTACHED_CATEGORIES
    )


def summarize_lengths(
    lengths: Sequence[float] | npt.NDArray[np.integer] | npt.NDArray[np.floating],
) -> dict[str, float]:
    """mean, std (ddof=0), p10, median, p90 and max of `lengths` [N]; an empty dict where there are none.

    Percentiles interpolate linearly. Nothing is NaN, so that the result can be written as strict JSON.
    """
    values = np.asarray(lengths, dtype=np.float64)
    if not values.size:
        return {}
    p10, median, p90 = np.percentile(values, [10, 50, 90])
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "p10": float(p10),
        "median": float(median),
        "p90": float(p90),
        "max": float(values.max()),
    }
