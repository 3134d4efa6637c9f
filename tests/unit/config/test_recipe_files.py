"""Recipe files and overrides: what is read, what is refused, and that a resolved recipe reads back as itself."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.config import Recipe, load_recipe
from ullim.config.load import check_recipe
from ullim.errors import BadInput
from ullim.monitor.toml_writer import to_toml

sys.path.insert(0, str(Path(__file__).parent))
from recipes import RIGHT, with_value

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "my.toml"
    path.write_text(to_toml(RIGHT), encoding="utf-8")
    return path


def test_values_reach_their_keys_and_the_rest_have_defaults(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file)
    assert recipe.policy.path == "model"
    assert recipe.rewards["len"].model_dump() == {
        "kind": "length",
        "target": 16.0,
        "width_short": 8.0,
        "width_long": 12.0,
        "unit": "tokens",
        "weight": 1.0,
    }
    assert recipe.loop.max_staleness == 1


def test_the_recipes_of_the_repository_are_right() -> None:
    found = sorted((REPOSITORY / "recipes").glob("*.toml"))
    assert found
    for path in found:
        load_recipe(path)


def test_a_missing_file_a_directory_and_one_that_may_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"nothere\.toml: no such recipe"):
        load_recipe(tmp_path / "nothere.toml")
    with pytest.raises(BadInput, match="a directory, not a recipe"):
        load_recipe(tmp_path)
    with pytest.raises(BadInput, match=r"cannot be read \(File name too long\)"):
        load_recipe(tmp_path / ("x" * 300))


def test_a_syntax_error_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text('[policy]\npath = "a"\npath = "b"\n', encoding="utf-8")
    with pytest.raises(BadInput, match=r"broken\.toml: not valid TOML: .*line 3"):
        load_recipe(path)


def test_a_file_that_is_not_utf8_says_where(tmp_path: Path) -> None:
    path = tmp_path / "latin.toml"
    path.write_bytes(b'[policy]\npath = "caf\xe9"\n')
    with pytest.raises(BadInput, match=r"latin\.toml: not UTF-8 \(.* at byte 20\)"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("loop.max_staleness=2", lambda r: r.loop.max_staleness == 2),
        ("--loop.max_staleness=2", lambda r: r.loop.max_staleness == 2),
        ("learner.learning_rate=2e-5", lambda r: r.learner.learning_rate == 2e-5),
        ("learner.weight_decay=1", lambda r: r.learner.weight_decay == 1.0),
        ("prompts.shuffle=false", lambda r: r.prompts.shuffle is False),
        ("learner.betas=[0.8, 0.9]", lambda r: r.learner.betas == (0.8, 0.9)),
        ('sampling.stop_strings=["\\n", "User:"]', lambda r: r.sampling.stop_strings == ("\n", "User:")),
        ("objective.correction.cap=5.0", lambda r: r.objective.correction.cap == 5.0),
        ("rewards.len.target=32", lambda r: r.rewards["len"].target == 32),
        ("rewards.len.unit=characters", lambda r: r.rewards["len"].unit == "characters"),
        ("rewards.new.kind=length_binary", lambda r: r.rewards["new"].limit == 9),  # with the next one
        ("loop.mode=sync", lambda r: r.loop.mode == "sync"),
        # Where only text can stand it is taken as written, whatever TOML would make of it.
        ("run.name=7", lambda r: r.run.name == "7"),
        ("run.name=true", lambda r: r.run.name == "true"),
        ("run.name=2026-11-30", lambda r: r.run.name == "2026-11-30"),
        ("prompts.heldout_path=1", lambda r: r.prompts.heldout_path == "1"),
        ('run.name="quoted"', lambda r: r.run.name == "quoted"),
        ("policy.path=a=b", lambda r: r.policy.path == "a=b"),
        ("policy.path=line\nother = 3", lambda r: r.policy.path == "line\nother = 3"),
    ],
)
def test_overrides_reach_their_key_as_their_type(recipe_file: Path, override: str, value: Any) -> None:
    more = ["rewards.new.limit=9"] if "rewards.new" in override else []
    assert value(load_recipe(recipe_file, [override, *more]))


def test_the_last_of_several_overrides_holds(recipe_file: Path) -> None:
    assert load_recipe(recipe_file, ["loop.steps=5", "loop.steps=6"]).loop.steps == 6


@pytest.mark.parametrize("override", ["loop.steps", "=3", "loop.=3", ".steps=3", "loop..steps=3", ""])
def test_an_override_of_another_form_says_how_it_is_written(recipe_file: Path, override: str) -> None:
    with pytest.raises(BadInput, match=r"write it as --section\.key=value"):
        load_recipe(recipe_file, [override])


def test_an_override_through_a_value_is_refused(recipe_file: Path) -> None:
    with pytest.raises(BadInput, match="path is a value, not a section"):
        load_recipe(recipe_file, ["policy.path.x=3"])


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("loop.steps=many", "loop.steps: Input should be a valid integer (found 'many')"),
        ("loop.steps=1\nx = 2", "loop.steps: Input should be a valid integer (found '1\\nx = 2')"),
        ("loop.stpes=3", "loop.stpes: unknown key; did you mean steps?"),
        ("loop=3", "loop: must be a section, [loop] with keys below it (found 3)"),
        ("rewards.len.kind=overlong", "rewards.len.limit: missing; this key is required"),
    ],
)
def test_a_wrong_override_is_named_like_a_wrong_key_and_shown(recipe_file: Path, override: str, line: str) -> None:
    with pytest.raises(BadInput) as caught:
        load_recipe(recipe_file, ["loop.groups_per_step=8", override])
    assert f"{recipe_file} --loop.groups_per_step=8 --{override}:" in str(caught.value)
    assert line in str(caught.value)


EVERYTHING = with_value("objective.correction", {"mode": "mask", "floor": 0.5, "level": "geometric"}) | {
    "sampling": {"stop_strings": ['"\n\\', "끝"], "temperature": 0.7},
    "run": {"name": "한글", "dir": "runs/{name}"},
    "learner": {"betas": [0.0, 0.5], "learning_rate": 1e-6},
    "rewards": {
        "a": {"kind": "length", "target": 1, "width_short": 0.5, "width_long": 2, "unit": "characters"},
        "b-2": {"kind": "length_binary", "limit": 3, "weight": 0},
        "c": {"kind": "overlong", "limit": 4, "buffer": 4},
        "d": {"kind": "function", "function": "a.b:c"},
        "e": {"kind": "model", "path": "x"},
    },
}


@pytest.mark.parametrize("data", [RIGHT, EVERYTHING, with_value("loop.mode", "sync")])
def test_a_resolved_recipe_reads_back_as_itself(tmp_path: Path, data: dict[str, Any]) -> None:
    recipe = check_recipe(data, "my.toml")
    assert read_back(recipe, tmp_path) == recipe


@settings(deadline=None, max_examples=50)
@given(
    st.floats(min_value=1e-300, max_value=1e300),
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), max_size=3),
    st.integers(min_value=0, max_value=2**63 - 1),
    st.integers(min_value=1, max_value=50) | st.none(),
)
def test_any_values_read_back(
    tmp_path_factory: pytest.TempPathFactory, rate: float, stops: list[str], seed: int, epochs: int | None
) -> None:
    data = RIGHT | {
        "learner": {"learning_rate": rate},
        "sampling": {"stop_strings": stops},
        "run": {"seed": seed},
        "prompts": {"path": "p"} | ({} if epochs is None else {"epochs": epochs}),
    }
    recipe = check_recipe(data, "my.toml")
    assert read_back(recipe, tmp_path_factory.mktemp("recipe")) == recipe


def read_back(recipe: Recipe, folder: Path) -> Recipe:
    """Through config.toml, the way a run directory keeps it."""
    path = folder / "config.toml"
    path.write_text(to_toml(recipe.model_dump(mode="json", exclude_none=True)), encoding="utf-8", newline="\n")
    return load_recipe(path)
