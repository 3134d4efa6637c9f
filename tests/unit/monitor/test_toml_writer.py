import tomllib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.config.loop import LoopConfig
from ullim.monitor.toml_writer import to_toml

# Lone surrogates have no UTF-8, hence no TOML.
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = text | st.integers() | st.booleans() | st.floats(allow_nan=False)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(text, values, max_size=4))
def test_tomllib_reads_back_what_was_written(data: dict[str, object]) -> None:
    read = tomllib.loads(to_toml(data))
    assert read == data
    assert repr(read) == repr({key: read[key] for key in read})
    assert _types(read) == _types(data)  # 1 == 1.0 == True, so equality alone would let a float become an int


def _types(value: object) -> object:
    if isinstance(value, dict):
        return {key: _types(item) for key, item in value.items()}
    return [_types(item) for item in value] if isinstance(value, list) else type(value)


def test_layout_is_the_one_a_person_would_write() -> None:
    config = {"policy": {"path": "a b"}, "rewards": {"length": {"target": 60.0, "kind": "length"}}, "name": "x"}
    assert to_toml(config) == (
        'name = "x"\n\n[policy]\npath = "a b"\n\n[rewards.length]\ntarget = 60.0\nkind = "length"\n'
    )


def test_none_is_left_out_and_tuples_are_lists() -> None:
    assert tomllib.loads(to_toml({"a": None, "b": {"c": None}, "d": (0.9, 0.95), "e": [{"f": None}]})) == {
        "b": {},
        "d": [0.9, 0.95],
        "e": [{}],
    }


def test_a_section_of_the_recipe_survives() -> None:
    section = LoopConfig(steps=3, watchdog_s=1e-6)
    assert LoopConfig(**tomllib.loads(to_toml(section.model_dump()))) == section


def test_infinities_and_numpy_floats() -> None:
    assert tomllib.loads(to_toml({"a": float("-inf"), "b": np.float64(1e-7)})) == {"a": float("-inf"), "b": 1e-7}
    assert np.isnan(tomllib.loads(to_toml({"a": float("nan")}))["a"])


@pytest.mark.parametrize("value", [[1, None], object(), [{"x": {1}}]])
def test_what_toml_cannot_hold_names_its_key(value: object) -> None:
    with pytest.raises(TypeError, match=r"loop\.odd"):
        to_toml({"loop": {"odd": value}})
