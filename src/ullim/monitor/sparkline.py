"""Numbers as a few characters: sparkline, bar, duration, shortened text."""

import math
import unicodedata
from collections.abc import Sequence

from rich.cells import cell_len, chop_cells

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """`values` as at most `width` characters from their lowest to their highest; a gap for None and NaN.

    More values than characters are averaged in equal stretches. Values that are all equal lie on the middle line.
    """
    points = _stretches(values, width)
    known = [point for point in points if point is not None]
    if not known:
        return " " * len(points)
    low, high = min(known), max(known)
    # Rounding noise of equal numbers must not be drawn as a mountain range.
    flat = high - low <= 1e-9 * max(1.0, abs(low), abs(high))
    middle = _BLOCKS[len(_BLOCKS) // 2 - 1]

    def block(point: float) -> str:
        return middle if flat else _BLOCKS[round((point - low) / (high - low) * (len(_BLOCKS) - 1))]

    return "".join(" " if point is None else block(point) for point in points)


def bar(share: float, width: int) -> str:
    """A share in [0, 1] as a bar of `width` characters; anything outside is drawn as empty or full."""
    filled = round(min(1.0, max(0.0, share)) * width)
    return "━" * filled + "╌" * (width - filled)


def duration(seconds: float) -> str:
    """3 s, 2:05, 1:02:05."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}:{minutes:02d}:{rest:02d}"
    return f"{minutes}:{rest:02d}" if minutes else f"{rest} s"


def number(value: float) -> str:
    """Three significant digits, without an exponent where that stays short."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    if 1e-3 <= abs(value) < 1e5:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:.{digits}f}"
    return f"{value:.1e}"


def one_line(text: str, width: int | None = None) -> str:
    """`text` on one line, shortened to `width` terminal cells (Hangul takes two), safe to print.

    Control characters are taken out: an answer of the model may hold escape sequences that would command the terminal.
    """
    words = "".join(" " if char.isspace() else char for char in text if char.isspace() or _printable(char))
    line = " ".join(words.split())
    if width is None or cell_len(line) <= width:
        return line
    if width < 1:
        return ""
    return (chop_cells(line, width - 1)[0] if width > 1 else "") + "…"


def _printable(char: str) -> bool:
    """Neither control, format (which holds the marks that turn text around), surrogate nor unassigned."""
    return unicodedata.category(char)[0] != "C"


def _stretches(values: Sequence[float | None], width: int) -> list[float | None]:
    known = [None if value is None or not math.isfinite(value) else float(value) for value in values]
    if len(known) <= width:
        return known
    points: list[float | None] = []
    for place in range(width):
        stretch = known[place * len(known) // width : (place + 1) * len(known) // width]
        numbers = [value for value in stretch if value is not None]
        points.append(sum(numbers) / len(numbers) if numbers else None)
    return points
