"""The end of a run on the terminal: figures before and after, answers side by side, and where to go next."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ullim.monitor.metrics import read_metrics
from ullim.orchestration.heldout import HeldoutAnswer, HeldoutResult
from ullim.orchestration.run import RunResult

SHOWN_ANSWERS = 3


def show_outcome(result: RunResult, console: Console, *, seconds: float) -> None:
    """Everything a person wants to know when a run has ended."""
    console.print()
    if result.before is not None and result.after is not None:
        console.print(rewards_table(result.before, result.after))
    console.print(loop_table(read_metrics(result.directory / "metrics.jsonl")))
    if result.before is not None and result.after is not None:
        console.print(answers_table(result.before, result.after))
    steps = f"{result.version} steps in {seconds / 60:.1f} min"
    console.print(f"[bold]{steps}[/], run directory [cyan]{escape(str(result.directory))}[/]")
    model = result.checkpoint / "model"
    console.print(f"Hugging Face checkpoint: [cyan]{escape(str(model))}[/]")
    console.print("\nNext, train on or look at the curves:")
    command = _as_typed("ullim")
    print(f"  {command} train {result.directory / 'config.toml'} --resume --loop.steps={2 * result.version}")
    if any((result.directory / "tensorboard").glob("*")):
        print(f"  {_as_typed('tensorboard')} --logdir {result.directory / 'tensorboard'}")


def rewards_table(before: HeldoutResult, after: HeldoutResult) -> Table:
    """Each channel's mean over held-out answers, before and after, with the length beside it."""
    answers = len(before.answers)
    table = Table(title=f"Held-out prompts, {answers} answers before and {len(after.answers)} after")
    table.add_column("")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    for name in before.rewards:
        _add(table, f"reward {name}", before.rewards[name], after.rewards.get(name), "{:+.3f}")
    _add(table, "length, tokens", before.length_mean, after.length_mean, "{:.1f}")
    _add(table, "cut off at the limit", before.truncated_fraction, after.truncated_fraction, "{:.1%}")
    return table


def loop_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """How the loop went, as means over its steps; the first step, which waits for the first answers, left out."""
    steady = rows[1:] or rows
    table = Table(title=f"The loop, mean of {len(steady)} steps after the first")
    table.add_column("")
    table.add_column("mean", justify="right")
    for label, name, form in (
        ("seconds per step", "timing/step", "{:.1f}"),
        ("completions per second", "throughput/completions_per_s", "{:.2f}"),
        ("staleness, versions", "staleness/mean", "{:.2f}"),
        ("answers dropped as stale (total)", "staleness/dropped", "{:.0f}"),
        ("mismatch, |Δ log-prob| per token", "mismatch/logprob_diff_mean", "{:.4f}"),
        ("mismatch, k3", "mismatch/k3", "{:.5f}"),
        ("importance weights capped", "correction/capped_fraction", "{:.2%}"),
        ("busy share of the learner", "utilisation/learner", "{:.0%}"),
        ("busy share of the nodes", "utilisation/node", "{:.0%}"),
    ):
        values = [value for row in steady if (value := _number(row.get(name))) is not None]
        if values:
            figure = values[-1] if "total" in label else fmean(values)
            table.add_row(label, form.format(figure))
    return table


def answers_table(before: HeldoutResult, after: HeldoutResult) -> Table:
    """The same prompts answered before and after. A resumed run may have answered others at its end: only common
    ones are shown."""
    table = Table(title="The same prompts, before and after", show_lines=True)
    for column in ("prompt (last turn)", "before", "after"):
        table.add_column(column, ratio=1, overflow="fold")
    first, last = _first_answers(before), _first_answers(after)
    for prompt_id in [prompt_id for prompt_id in first if prompt_id in last][:SHOWN_ANSWERS]:
        old = first[prompt_id]
        table.add_row(escape(old.last_turn), _told(old), _told(last[prompt_id]))
    return table


def _first_answers(result: HeldoutResult) -> dict[str, HeldoutAnswer]:
    """One answer per prompt, in order of the prompts."""
    found: dict[str, HeldoutAnswer] = {}
    for answer in result.answers:
        found.setdefault(answer.prompt_id, answer)
    return found


def _as_typed(program: str) -> str:
    """How to call a program of this environment, whether or not it was activated."""
    return program if shutil.which(program) else str(Path(sys.executable).parent / program)


def _told(answer: HeldoutAnswer) -> str:
    scores = ", ".join(f"{name} {value:+.2f}" for name, value in answer.scores.items() if value is not None)
    return f"{escape(answer.text.strip())}\n[dim]{scores}[/]"


def _add(table: Table, label: str, old: float | None, new: float | None, form: str) -> None:
    if old is None or new is None:
        table.add_row(label, *("-" if value is None else form.format(value) for value in (old, new)), "-")
    else:
        signed = form.replace("{:", "{:+", 1).replace("++", "+")
        table.add_row(label, form.format(old), form.format(new), signed.format(new - old))


def _number(value: object) -> float | None:
    """A metric as one number; those kept by node are averaged over the nodes."""
    if isinstance(value, Mapping):
        return fmean(value.values()) if value else None
    return float(value) if isinstance(value, int | float) else None
