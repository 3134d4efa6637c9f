"""The live view's one screenful, and its one plain line a step: pure functions of `Progress`."""

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ullim.monitor.progress import Progress, Series
from ullim.monitor.sparkline import bar, duration, number, one_line, sparkline
from ullim.monitor.step_view import StepView

_NODES_SHOWN = 3
_WIDE = 68  # cells from which three columns of facts have room
_LABEL = "bright_black"
_BORDER_CELLS = 4  # panel border and padding, left and right


def frame(progress: Progress, now: float, console: Console) -> RenderableType:
    """Everything in one panel that fits `console`; the sample, then the notes give way on a low screen."""
    width = max(20, console.width - _BORDER_CELLS)
    head: list[RenderableType] = [_progress_line(progress, now, width), Text()]
    head.append(_trends(progress, width))
    if progress.view is not None:
        head += [Text(), _facts(progress.view, width)]
    sample = _sample(progress.view, width, console)
    tail = _notes(progress, width)
    if progress.status:
        tail.append(Text(one_line(progress.status, width), style="cyan"))
    for body in ([*head, *sample, *tail], [*head, *tail], head):
        panel = Panel(
            Group(*body), title=Text(one_line(progress.title, width - 4)), title_align="left", border_style=_LABEL
        )
        if len(console.render_lines(panel)) < console.height:
            break
    return panel


def plain_line(progress: Progress, now: float) -> str:
    """The newest step as one line without control codes, for log files and pipes."""
    view = progress.view
    assert view is not None
    parts = [f"step {view.step}/{progress.total_steps}"]
    if view.seconds is not None:
        parts.append(f"{view.seconds:.1f} s")
    rewards = [f"{name} {_value(series)}{_change(series)}" for name, series in progress.rewards.items()]
    parts.append("reward " + ", ".join(rewards))
    parts += [f"{label} {text}" for column in _columns(view) for label, text in column]
    if view.learner_busy is not None:
        parts.append(f"learner busy {view.learner_busy:.0%}")
    parts += [f"{one_line(name)} busy {share:.0%}" for name, share in _shown_nodes(view)]
    if view.completions_per_s is not None:
        parts.append(f"{number(view.completions_per_s)} completions/s")
    eta = progress.eta_s(now)
    if eta is not None and view.step < progress.total_steps:
        parts.append(f"ETA {duration(eta)}")
    return " | ".join(parts)


def _progress_line(progress: Progress, now: float, width: int) -> Text:
    share = progress.step / progress.total_steps
    left = f"step {progress.step}/{progress.total_steps}"
    eta = progress.eta_s(now)
    facts = [f"{share:.0%}", f"elapsed {duration(now - progress.began)}"]
    if progress.step >= progress.total_steps:
        facts.append("done")
    else:
        facts.append(f"ETA {duration(eta)}" if eta is not None else "ETA after two steps")
    if progress.view is not None and progress.view.completions_per_s is not None:
        facts.append(f"{number(progress.view.completions_per_s)} completions/s")
    right = "  ".join(facts)
    room = width - len(left) - len(right) - 4
    line = Text(left, style="bold", no_wrap=True, overflow="ellipsis")
    if room >= 5:
        line.append(f"  {bar(share, room)}", style="not bold cyan")
    return line.append(f"  {right}", style="not bold")


def _trends(progress: Progress, width: int) -> Table:
    rows = [(name, series, True) for name, series in progress.rewards.items()]
    others = (("length (tokens)", progress.length, False), ("entropy (nats)", progress.entropy, False))
    rows += [row for row in others if row[1].last is not None]
    label_width = min(24, max(map(len, ["length (tokens)", *progress.rewards])))
    table = Table(box=None, padding=(0, 1, 0, 0), expand=True, header_style=_LABEL)
    table.add_column("reward", width=label_width, no_wrap=True)
    table.add_column("last", width=8, justify="right", no_wrap=True)
    table.add_column("since start", width=11, justify="right", no_wrap=True)
    table.add_column("trend", ratio=1, no_wrap=True)
    trend_width = max(4, width - label_width - 8 - 11 - 4)
    for name, series, is_reward in rows:
        change = series.change
        style = "" if not is_reward or not change else "green" if change > 0 else "red"
        line = sparkline(series.values, trend_width)
        table.add_row(
            Text(one_line(name, label_width), style="bold" if is_reward else _LABEL),
            Text(_value(series)),
            Text("" if change is None else _signed(change), style=style),
            Text(line, style="cyan" if is_reward else _LABEL),
        )
    return table


def _facts(view: StepView, width: int) -> Table:
    """Columns of label and value: the answers, the objective, the devices; on a narrow screen the first two in one."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    answers, objective = ([(label, Text(text)) for label, text in column] for column in _columns(view))
    objective = [(label, value) for label, value in objective if label != "entropy"]  # has a row of its own above
    columns = [answers, objective] if width >= _WIDE else [answers + objective]
    column_width = (width - 2 * len(columns)) // (len(columns) + 1)
    columns.append(_devices(view, column_width))
    for _ in columns:
        grid.add_column(width=column_width)
    grid.add_row(*(_pairs(column, column_width) for column in columns))
    return grid


def _pairs(pairs: Sequence[tuple[str, Text]], width: int) -> Table:
    label_width = max((len(label) for label, _ in pairs), default=0)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(width=min(label_width, width // 2), no_wrap=True, style=_LABEL)
    table.add_column(no_wrap=True, overflow="ellipsis")
    for label, value in pairs:
        table.add_row(Text(label), value)
    return table


def _columns(view: StepView) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """(answers, objective): label and value of what is known."""
    answers: list[tuple[str, str]] = []
    if view.length_mean is not None:
        p90 = "" if view.length_p90 is None else f", p90 {view.length_p90:.0f}"
        answers.append(("length", f"{view.length_mean:.0f}{p90}"))
    if view.truncated_fraction is not None:
        answers.append(("cut off", f"{view.truncated_fraction:.0%}"))
    if view.lag_mean is not None:
        most = "" if view.lag_max is None else f", max {view.lag_max:.0f}"
        answers.append(("lag", f"{number(view.lag_mean)}{most}"))
    if view.dropped is not None:
        answers.append(("too old", f"{view.dropped:.0f}"))
    objective: list[tuple[str, str]] = []
    if view.mismatch_k3 is not None:
        objective.append(("mismatch k3", number(view.mismatch_k3)))
    if view.capped_fraction is not None:
        objective.append(("capped", f"{view.capped_fraction:.1%}"))
    if view.clip_fraction is not None:
        objective.append(("clipped", f"{view.clip_fraction:.1%}"))
    if view.entropy is not None:
        objective.append(("entropy", number(view.entropy)))
    if view.grad_norm is not None:
        objective.append(("grad norm", number(view.grad_norm)))
    return answers, objective


def _devices(view: StepView, width: int) -> list[tuple[str, Text]]:
    shares = ([] if view.learner_busy is None else [("learner", view.learner_busy)]) + _shown_nodes(view)
    label_width = min(max((len(one_line(name)) for name, _ in shares), default=0), width // 2)
    bar_width = max(3, width - label_width - 8)
    rows = []
    for name, share in shares:
        value = Text(bar(share, bar_width), style="cyan").append(f" {share:4.0%}", style="default")
        rows.append((one_line(name, label_width), value))
    groups = [
        *([] if view.admitted is None else [f"{view.admitted}" + (f"/{view.capacity}" if view.capacity else "")]),
        *([] if view.buffered is None else [f"{view.buffered} ready"]),
    ]
    if groups:
        rows.append(("groups", Text(", ".join(groups))))
    return rows


def _shown_nodes(view: StepView) -> list[tuple[str, float]]:
    """Each node while they are few, else the least and the most busy and the mean."""
    nodes = sorted(view.nodes_busy.items())
    if len(nodes) <= _NODES_SHOWN:
        return nodes
    shares = [share for _, share in nodes]
    low, high = min(nodes, key=lambda node: node[1]), max(nodes, key=lambda node: node[1])
    return [(f"{len(nodes)} nodes", sum(shares) / len(shares)), low, high]


def _sample(view: StepView | None, width: int, console: Console) -> list[RenderableType]:
    if view is None or view.sample is None:
        return []
    sample = view.sample
    scores = ", ".join(f"{name} {'none' if value is None else number(value)}" for name, value in sample.scores.items())
    room = width - 8
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=6, style=_LABEL)
    table.add_column(no_wrap=True)
    table.add_row("asked", Text(one_line(sample.prompt, room)))
    table.add_row("answer", _two_lines(sample.answer, room, console))
    table.add_row("scores", Text(one_line(scores, room)))
    return [Text(), table]


def _two_lines(text: str, width: int, console: Console) -> Text:
    """The beginning of `text`, broken between words."""
    first, *rest = Text(one_line(text), style="bold").wrap(console, width) or [Text()]
    if not rest:
        return first
    second = one_line(" ".join(line.plain for line in rest), width)
    return first.append("\n").append(second)


def _notes(progress: Progress, width: int) -> list[RenderableType]:
    if not progress.notes:
        return []
    lines: list[RenderableType] = [Text()]
    lines += [Text(f"! {one_line(note, width - 2)}", style="yellow", no_wrap=True) for note in list(progress.notes)]
    if hidden := progress.notes_total - len(progress.notes):
        lines[0] = Text(f"{hidden} earlier notes", style=_LABEL)
    return lines


def _value(series: Series) -> str:
    return "none" if series.last is None else number(series.last)


def _change(series: Series) -> str:
    return "" if series.change is None else f" ({_signed(series.change)})"


def _signed(value: float) -> str:
    text = number(value)
    return text if text.startswith("-") else f"+{text}"
