from dataclasses import replace
from pathlib import Path

import pytest

from ullim.assets.packages import package_folder
from ullim.assets.references import BUILTINS, Progress, resolve, resolve_recipe
from ullim.config.load import check_recipe
from ullim.errors import BadInput


@pytest.fixture(autouse=True)
def fake_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every builtin is made at once as an empty folder; the list says what was made."""
    monkeypatch.setenv("ULLIM_CACHE", str(tmp_path / "cache"))
    made: list[str] = []

    def build(folder: Path, progress: Progress) -> None:
        progress("making", 1.0)
        made.append(folder.name)

    fakes = {name: replace(builtin, build=build) for name, builtin in BUILTINS.items()}
    monkeypatch.setattr("ullim.assets.references.BUILTINS", fakes)
    return made


def test_a_path_stays_a_path() -> None:
    assert resolve("some/folder") == Path("some/folder")
    assert resolve("~/x") == Path.home() / "x"


def test_a_builtin_is_made_on_first_use_with_progress(fake_builds: list[str]) -> None:
    told: list[str] = []
    first = resolve("builtin:smollm2-135m", lambda text, share: told.append(text))
    again = resolve("builtin:smollm2-135m", lambda text, share: told.append(text))
    assert first == again
    assert first.is_dir()
    assert told == ["making"]


def test_both_prompt_files_come_from_one_build(fake_builds: list[str]) -> None:
    train, heldout = resolve("builtin:chitchat"), resolve("builtin:chitchat-heldout")
    assert (train.name, heldout.name) == ("train.jsonl", "heldout.jsonl")
    assert train.parent == heldout.parent
    assert len(fake_builds) == 1


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(BadInput, match=r"no builtin:gpt; known are .*builtin:chitchat-kept-talking \(a reward model"):
        resolve("builtin:gpt")


def test_a_recipe_is_resolved_everywhere_and_gets_held_out_prompts_of_other_conversations() -> None:
    length = {"kind": "length", "target": 30, "width_short": 10, "width_long": 10}
    recipe = check_recipe(
        {
            "policy": {"path": "builtin:smollm2-135m"},
            "prompts": {"path": "builtin:chitchat"},
            "rewards": {"talk": {"kind": "model", "path": "builtin:chitchat-kept-talking"}, "length": length},
        },
        "test",
    )
    resolved = resolve_recipe(recipe)
    paths = [resolved.policy.path, resolved.prompts.path, resolved.prompts.heldout_path, resolved.rewards["talk"].path]
    assert all(path is not None and Path(path).is_absolute() for path in paths)
    assert str(resolved.prompts.heldout_path).endswith("heldout.jsonl")
    assert resolved.rewards["length"] == recipe.rewards["length"]
    assert recipe.policy.path == "builtin:smollm2-135m"


def test_a_users_own_paths_and_held_out_prompts_are_left_alone() -> None:
    length = {"kind": "length", "target": 30, "width_short": 10, "width_long": 10}
    recipe = check_recipe(
        {"policy": {"path": "m"}, "prompts": {"path": "p.jsonl"}, "rewards": {"length": length}}, "test"
    )
    assert resolve_recipe(recipe) == recipe


def test_an_absent_package_is_named_with_the_ways_to_get_it() -> None:
    with pytest.raises(
        BadInput, match=r"llm-absent is not installed; run `make demo`, or `pip install \"ullim\[demo\]"
    ):
        package_folder("surely_absent_module", package="llm-absent")
