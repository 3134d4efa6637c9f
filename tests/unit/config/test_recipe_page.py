"""docs/recipes.md is the config models' own words, and its example is a recipe."""

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from ullim.config.load import check_recipe

REPOSITORY = Path(__file__).parents[3]
PAGE = REPOSITORY / "docs" / "recipes.md"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipe_reference", REPOSITORY / "scripts" / "recipe_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_committed_page_is_up_to_date(script: ModuleType) -> None:
    assert script.page() == PAGE.read_text(encoding="utf-8"), "run: python scripts/recipe_reference.py"


def test_an_old_page_is_noticed_and_written_anew(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "PAGE", tmp_path / "recipes.md")
    script.PAGE.write_text("old", encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["recipe_reference.py", "--check"])
    assert script.main() == 1
    assert "out of date" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["recipe_reference.py"])
    assert script.main() == 0
    monkeypatch.setattr(sys, "argv", ["recipe_reference.py", "--check"])
    assert script.main() == 0


@pytest.mark.parametrize(
    "row",
    [
        "| `path` | text | **required** | A Hugging Face causal LM folder",
        "| `max_staleness` | integer ≥ 0 | `1` | η: ",
        "| `betas` | list of 2 × number ≥ 0, < 1 | `[0.9, 0.95]` | ",
        "| `clip_low` | number > 0, < 1 | `0.2` | ",
        '| `mode` | `"async"` or `"sync"` | `"async"` | ',
        "| `epochs` | integer ≥ 1 | left out | ",
        "| `stop_strings` | list of text | `[]` | ",
        "## `[objective.correction]`",
        '## `[rewards.NAME]` of kind `"overlong"`',
    ],
)
def test_a_key_has_its_type_bounds_default_and_text(script: ModuleType, row: str) -> None:
    assert f"\n{row}" in script.page()


def test_the_example_is_a_recipe() -> None:
    example = PAGE.read_text(encoding="utf-8").split("```toml\n")[1].split("```")[0]
    recipe = check_recipe(tomllib.loads(example), "the example")
    assert recipe.rewards["politeness"].kind == "function"
