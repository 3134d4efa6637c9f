import io
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from ullim.monitor.live import LiveView
from ullim.monitor.progress import Progress, Series
from ullim.monitor.sparkline import bar, duration, number, one_line, sparkline
from ullim.monitor.step_view import SampleView, StepView


class Hand:
    """A clock moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


METRICS = {
    "reward/length/mean": 0.7,
    "reward/kept_talking/mean": None,
    "length/mean": 61.0,
    "length/p90": 64.0,
    "length/truncated_fraction": 0.13,
    "staleness/mean": 0.83,
    "staleness/max": 2,
    "staleness/histogram": {0: 1},
    "mismatch/k3": 0.00123,
    "correction/capped_fraction": 0.004,
    "ratio/clip_low_fraction": 0.01,
    "ratio/clip_high_fraction": 0.02,
    "entropy": 2.0,
    "utilisation/learner": 0.5,
    "utilisation/node": {"node-0": 0.9},
    "gate/admitted": 22,
    "gate/capacity": 24,
    "buffer/ready": 3,
    "timing/step": 14.2,
    "throughput/completions_per_s": 4.5,
}
SAMPLE = SampleView("오늘 저녁에 뭐 먹을까? " * 9, "된장찌개가\n좋겠어요! " * 30, {"length": 0.7, "kept_talking": None})


def view_on(console: Console, steps: int = 2, clock: Hand | None = None) -> LiveView:
    clock = clock or Hand()
    view = LiveView(10, ["length", "kept_talking"], title="ullim · 울림", console=console, clock=clock)
    for step in range(1, steps + 1):
        clock.now += 10
        view.update(StepView.from_metrics(step, METRICS, SAMPLE))
    return view


def drawn(width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, record=True)
    view = view_on(console)
    view.note("node-0 was restarted: its process ended " * 4)
    view.status("waits for groups")
    console.print(view.render())
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 140, 200])
def test_the_frame_is_a_clean_rectangle_also_with_wide_letters(width: int) -> None:
    lines = drawn(width, 40)
    assert {cell_len(line) for line in lines} == {width}
    assert lines[0].startswith("╭─ ullim · 울림 ─")
    assert all(line[0] == line[-1] == "│" for line in lines[1:-1])


@pytest.mark.parametrize("width", [80, 140])
def test_what_one_screenful_says(width: int) -> None:
    text = "\n".join(drawn(width, 24))
    for fact in (
        *("step 2/10", "20%", "elapsed 20 s", "ETA 1:20", "4.50 completions/s", "0.700", "none", "61, p90 64", "13%"),
        *("0.830, max 2", "0.00123", "0.4%", "3.0%", "2.00", "50%", "90%", "22/24, 3 ready", "된장찌개가 좋겠어요!"),
        *("length 0.700, kept_talking none", "! node-0 was restarted", "waits for groups"),
    ):
        assert fact in text, fact


def test_on_a_low_screen_the_sample_gives_way_then_the_notes() -> None:
    assert "asked" in "".join(drawn(80, 24))
    lower = "".join(drawn(80, 20))
    assert "asked" not in lower
    assert "! node-0" in lower
    assert "! node-0" not in "".join(drawn(80, 14))


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_log_file_gets_one_plain_line_a_step(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    raw = io.BytesIO()
    clock = Hand()
    console = Console(file=io.TextIOWrapper(raw, encoding=encoding), force_terminal=False)
    with view_on(console, clock=clock) as view:
        view.note("울림 node-0\x1b[2J restarted")
        view.status("too soon to say")
        clock.now += 30
        view.status("waits for groups")
    lines = raw.getvalue().decode(encoding).splitlines()
    assert lines[0].startswith("step 1/10 | 14.2 s | reward length 0.700, kept_talking none | length 61, p90 64 |")
    assert lines[1].startswith("step 2/10 | 14.2 s | reward length 0.700 (+0), kept_talking none |")
    assert lines[1].endswith("| learner busy 50% | node-0 busy 90% | 4.50 completions/s | ETA 1:20")
    assert lines[2:] == [f"note: {'울림' if encoding == 'utf-8' else '??'} node-0[2J restarted", "waits for groups"]


def test_on_a_terminal_it_draws_and_gives_the_terminal_back() -> None:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=True, width=80, height=30, legacy_windows=False, _environ={"TERM": "xterm"}
    )
    with pytest.raises(KeyError), view_on(console):
        raise KeyError
    text = out.getvalue()
    assert text.index("\x1b[?25l") < text.rindex("step 2/10") < text.rindex("\x1b[?25h")  # the cursor is back


def test_an_answer_cannot_command_the_terminal() -> None:
    hostile = "\x1b]0;owned\x07a\u202eb\r\nc\x9b31m"
    assert one_line(hostile) == "]0;ownedab c31m"
    console = Console(width=80, height=30, file=io.StringIO(), force_terminal=True, record=True)
    view = LiveView(10, [hostile], title=hostile, console=console)
    view.update(StepView(step=1, sample=SampleView(hostile, hostile, {hostile: 1.0}), nodes_busy={hostile: 1.0}))
    view.note(hostile)
    view.status(hostile)
    console.print(view.render())
    ours = re.compile(r"\x1b\[[0-9;]*m")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", ours.sub("", console.export_text(styles=True)))


@settings(deadline=None, max_examples=50)
@given(st.text(max_size=30), st.integers(0, 20))
def test_one_line_never_exceeds_its_width(text: str, width: int) -> None:
    line = one_line(text, width)
    assert cell_len(line) <= width
    assert line.isprintable() or line == ""


def test_one_line_keeps_what_fits_and_marks_what_does_not() -> None:
    assert one_line("안녕 하세요", 11) == "안녕 하세요"
    assert one_line("안녕 하세요", 10) == "안녕 하세…"
    assert one_line("안녕", 2) == "…"


def test_sparkline_by_hand() -> None:
    assert sparkline([0, 1, 7], 10) == "▁▂█"
    assert sparkline([5.0, 5.0], 10) == "▄▄"
    assert sparkline([0.0, None, math.nan, 1.0], 10) == "▁  █"
    assert sparkline([0, 0, 7, 7, 14, 14], 3) == "▁▅█"  # means 0, 7, 14; half way rounds to even
    assert sparkline([], 5) == ""
    assert sparkline([None], 5) == " "


@settings(deadline=None, max_examples=50)
@given(st.lists(st.none() | st.floats(), max_size=60), st.integers(1, 20))
def test_sparkline_never_exceeds_its_width(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_small_formats() -> None:
    assert [duration(s) for s in (0, 59.4, 59.6, 3725)] == ["0 s", "59 s", "1:00", "1:02:05"]
    assert [number(v) for v in (0, 0.00123, 0.71, 61.26, 12345.6, 1e-6, 1e9)] == [
        *("0", "0.00123", "0.710", "61.3", "12346", "1.0e-06", "1.0e+09")
    ]
    assert bar(0.5, 4) == "━━╌╌"
    assert bar(7.0, 3) == "━━━"


def test_change_compares_ends_not_single_steps() -> None:
    assert Series([1.0]).change is None
    assert Series([1.0, None, 3.0]).change == 2.0
    # Eight values: means of two at either end.
    assert Series([0.0, 2.0, 9, 9, 9, 9, 5.0, 7.0]).change == pytest.approx(6 - 1)


def test_eta_leaves_out_the_start_and_follows_the_recent_pace() -> None:
    progress = Progress("t", 100, [], first_step=0, began=0.0)
    assert progress.eta_s(50.0) is None
    progress.add(StepView(step=1), 50.0)  # loading
    assert progress.eta_s(50.0) is None
    progress.add(StepView(step=2), 60.0)
    assert progress.eta_s(60.0) == pytest.approx(98 * 10)
    assert progress.eta_s(64.0) == pytest.approx(98 * 10 - 4)
    assert progress.eta_s(999.0) == pytest.approx(97 * 10)  # a step that drags on does not eat the next ones
    for step in range(3, 40):
        progress.add(StepView(step=step), 60.0 + 2 * (step - 2))
    assert progress.eta_s(60.0 + 2 * 37) == pytest.approx(61 * 2)


def test_many_nodes_are_summed_up() -> None:
    console = Console(width=120, height=40, file=io.StringIO(), force_terminal=True, record=True)
    view = LiveView(10, [], console=console)
    view.update(StepView(step=1, nodes_busy={f"n{i}": i / 10 for i in range(5)}))
    console.print(view.render())
    text = console.export_text()
    assert "5 nodes" in text
    assert " 20%" in text
    assert "n0" in text
    assert "n4" in text
    assert "n2" not in text
