"""What is typed after `ullim`, and the exit status and words of each way of ending."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ullim.cli import doctor, main, training
from ullim.config.run import Recipe
from ullim.errors import BadInput, RunFailed

RECIPE = """
[policy]
path = "model"
[prompts]
path = "prompts.jsonl"
[rewards.len]
kind = "length_binary"
limit = 3
"""


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], []),
        (["--loop.steps=3"], ["loop.steps=3"]),
        (["--loop.steps", "3", "--run.name=x"], ["loop.steps=3", "run.name=x"]),
        (["--a.b", "-1"], ["a.b=-1"]),
        (["--a.b=--c"], ["a.b=--c"]),
        (["--a.b="], ["a.b="]),
        (["--a.b=c=d"], ["a.b=c=d"]),
    ],
)
def test_overrides_are_written_with_or_without_an_equals_sign(arguments: list[str], found: list[str]) -> None:
    assert training.overrides(arguments) == found


@pytest.mark.parametrize("arguments", [["--a.b"], ["--a.b", "--c.d=1"]])
def test_an_override_without_a_value_is_named(arguments: list[str]) -> None:
    with pytest.raises(BadInput, match=r"--a\.b: a value is missing; write --a\.b=VALUE"):
        training.overrides(arguments)


@pytest.mark.parametrize("argument", ["loop.steps=3", "-s", "more.toml"])
def test_anything_else_is_refused(argument: str) -> None:
    with pytest.raises(BadInput, match="unexpected argument"):
        training.overrides([argument])


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit status of `ullim ARGUMENTS` in this process; 0 where main returns."""
    monkeypatch.setattr(sys, "argv", ["ullim", *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        main.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_recipe_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "train", "nothere.toml") == 2
    assert "error: nothere.toml: no such recipe" in capsys.readouterr().err


def test_a_wrong_key_names_it_with_brackets_and_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "my.toml"
    path.write_text(RECIPE, encoding="utf-8")
    assert run_main(monkeypatch, "train", str(path), "--loop.stpes=3") == 2
    error = capsys.readouterr().err
    assert "loop.stpes: unknown key; did you mean steps? [loop] has: group_size" in error
    assert len(error.strip().splitlines()) == 2  # the source, and one line for one mistake


def test_a_wrong_recipe_is_told_before_torch_or_ray_load(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text(RECIPE.replace("limit", "limt"), encoding="utf-8")
    code = (
        "import sys; from ullim.cli.main import main; sys.argv = ['ullim', 'train', sys.argv[1]]\n"
        "try: main()\n"
        "finally: print(sorted({'torch', 'ray'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout.strip() == "[]"
    assert "rewards.len.limit: missing" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("ending", "status", "words"),
    [
        (BadInput("[policy] is wrong :x:"), 2, "error: [policy] is wrong :x:"),
        (RunFailed("node-0 died [/]"), 1, "run failed: node-0 died [/]"),
        (KeyboardInterrupt(), 130, "interrupted; go on from the newest checkpoint with --resume"),
    ],
)
def test_each_way_of_ending_has_its_status_and_words(
    ending: BaseException,
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*arguments: object, **options: object) -> None:
        raise ending

    monkeypatch.setattr(training, "run_recipe", run)
    assert run_main(monkeypatch, "train", "my.toml") == status
    assert words in capsys.readouterr().err


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "run_recipe", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_main(monkeypatch, "train", "my.toml")


def test_train_hands_on_recipe_overrides_and_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(training, "run_recipe", lambda *a, **k: seen.append((a, k)))
    assert run_main(monkeypatch, "train", "my.toml", "--loop.steps", "3", "--resume", "--run.name=x") == 0
    assert seen == [(("my.toml", ["--loop.steps", "3", "--run.name=x"]), {"resume": True})]


def test_the_demo_takes_a_name_that_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def run(recipe: Recipe, console: object, *, resume: bool) -> None:
        names.append(recipe.run.name)
        assert not resume
        Path(recipe.run.dir.format(name=recipe.run.name)).mkdir(parents=True)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(training, "_run", run)
    training.run_demo([])
    training.run_demo(["--loop.steps=3"])
    training.run_demo(["--run.name=mine"])
    assert names == ["demo", "demo-2", "mine"]


def test_no_command_shows_help_and_an_unknown_one_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "--version") == 0
    assert capsys.readouterr().out.startswith("ullim 0.")
    assert run_main(monkeypatch, "trian") == 2
    run_main(monkeypatch)
    assert "train" in capsys.readouterr().out


def test_doctor_says_what_is_there_and_what_will_be_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(doctor, "NEEDED", ("torch", "no-such-package"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert run_main(monkeypatch, "doctor") == 0
    out = capsys.readouterr().out
    rows = {line.split("│")[1].strip(): line for line in out.splitlines() if line.count("│") > 2}
    assert "missing: run make demo" in rows["no-such-package"]
    assert "missing" not in rows["torch"]
    assert "RAY_ADDRESS is not set" in rows["ray"]
    assert "transformers, embedded" in rows["engine"]
    assert "gloo" in rows["weight transport"]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    run_main(monkeypatch, "doctor")
    assert "the cluster at RAY_ADDRESS=10.0.0.1:6379" in capsys.readouterr().out


def test_main_looks_for_modules_where_it_was_typed(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("print('found')\n", encoding="utf-8")
    code = "from ullim.cli import main, training; training.run_recipe = lambda *a, **k: __import__('mine'); main.main()"
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # a console script has no '' on its path
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "my.toml"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "found\n", done.stderr
