"""The tables at the end of a run, from hand-made results."""

from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from ullim.cli.outcome import answers_table, loop_table, rewards_table, show_outcome
from ullim.monitor.metrics import MetricsWriter
from ullim.monitor.run_directory import RunDirectory
from ullim.orchestration.heldout import HeldoutAnswer, HeldoutResult
from ullim.orchestration.run import RunResult


def answer(prompt_id: str, text: str, **scores: float | None) -> HeldoutAnswer:
    return HeldoutAnswer(prompt_id, f"turn of {prompt_id}", text, len(text), dict(scores))


def result(*answers: HeldoutAnswer, length: float = 10.0, cut: float = 0.0, **rewards: float | None) -> HeldoutResult:
    return HeldoutResult(0, dict(rewards), length, cut, answers)


def cells(table: Table) -> list[list[str]]:
    return [list(row) for row in zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)]


def rendered(table: Table) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w", encoding="utf-8"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_rewards_before_after_and_their_change() -> None:
    before = result(answer("a", "x"), length=40.25, cut=0.5, taste=0.25)
    after = result(answer("a", "y"), answer("b", "z"), length=16.0, cut=0.0, taste=-0.125)
    table = rewards_table(before, after)
    assert table.title == "Held-out prompts, 1 answers before and 2 after"
    assert cells(table) == [
        ["reward taste", "+0.250", "-0.125", "-0.375"],
        ["length, tokens", "40.2", "16.0", "-24.2"],
        ["cut off at the limit", "50.0%", "0.0%", "-50.0%"],
    ]


def test_a_channel_without_a_single_score_has_no_number() -> None:
    table = rewards_table(result(taste=None, other=1.0), result(taste=0.5, other=None))
    assert cells(table)[:2] == [["reward taste", "-", "+0.500", "-"], ["reward other", "+1.000", "-", "-"]]


def test_a_channel_that_a_resumed_run_no_longer_has() -> None:
    assert cells(rewards_table(result(gone=0.5), result(new=1.0)))[0] == ["reward gone", "+0.500", "-", "-"]


def test_the_loop_without_its_first_step() -> None:
    rows = [
        {"timing/step": 99.0, "staleness/dropped": 0, "utilisation/node": {"node-0": 0.0}},
        {"timing/step": 2.0, "staleness/dropped": 3, "utilisation/node": {"node-0": 0.5, "node-1": 0.7}},
        {"timing/step": 4.0, "staleness/dropped": 8, "utilisation/node": {"node-0": 0.9}, "mismatch/k3": None},
    ]
    table = loop_table(rows)
    assert table.title == "The loop, mean of 2 steps after the first"
    assert cells(table) == [
        ["seconds per step", "3.0"],
        ["answers dropped as stale (total)", "8"],
        ["busy share of the nodes", "75%"],
    ]


def test_a_run_without_steps_or_with_one() -> None:
    assert cells(loop_table([])) == []
    assert cells(loop_table([{"timing/step": 2.0, "utilisation/node": {}}])) == [["seconds per step", "2.0"]]


def test_answers_side_by_side_one_per_prompt() -> None:
    before = result(*(answer(name, f"old {name}{n}", taste=0.5) for n, name in enumerate("aabbccddee")))
    after = result(*(answer(name, f"new {name}{n}", taste=None) for n, name in enumerate("aabbccddee")))
    rows = cells(answers_table(before, after))
    assert [row[0] for row in rows] == ["turn of a", "turn of b", "turn of c"]
    assert rows[0][1] == "old a0\n[dim]taste +0.50[/]"
    assert rows[0][2] == "new a0\n[dim][/]"


def test_a_resumed_run_that_answered_other_prompts_at_its_end() -> None:
    before = result(answer("a", "old a"), answer("b", "old b"))
    after = result(answer("b", "new b"), answer("c", "new c"), answer("d", "new d"))
    assert [row[0] for row in cells(answers_table(before, after))] == ["turn of b"]


def test_an_answer_is_shown_as_it_is_written() -> None:
    before, after = result(answer("a", "[bold]not bold[/] [/]")), result(answer("a", "plain"))
    assert "[bold]not bold[/] [/]" in rendered(answers_table(before, after))


@pytest.mark.parametrize("heldout", [True, False])
def test_everything_together_names_folder_checkpoint_and_next_command(
    tmp_path: Path, heldout: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = RunDirectory.create(tmp_path / "run", {"run": {"name": "x"}})
    with MetricsWriter(directory, tensorboard=True) as metrics:
        metrics.write(1, {"timing/step": 2.0})
    figures = result(answer("a", "text"), taste=0.5) if heldout else None
    done = RunResult(directory.path, directory.checkpoints / "step-000001", 1, figures, figures)
    show_outcome(done, Console(width=300), seconds=90.0)
    out = capsys.readouterr().out
    assert "1 steps in 1.5 min" in out
    assert str(directory.checkpoints / "step-000001" / "model") in out
    assert f"train {directory.config} --resume --loop.steps=2" in out
    assert f"--logdir {directory.tensorboard}" in out
    assert ("reward taste" in out) is heldout
