import asyncio
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.records import Completion, FinishReason, Message, Prompt
from ullim.rewards.length import (
    LengthChannel,
    binary_channel,
    binary_length_reward,
    continuous_channel,
    length_reward,
    overlong_channel,
)

PROMPT = Prompt("p", 0, (Message("user", "hi"),), np.array([1, 2], np.int32))


def completion(tokens: int, text: str = "", finish: FinishReason = "stop") -> Completion:
    return Completion(
        np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.float32), np.zeros(tokens, np.int32), finish, text
    )


def values(channel: LengthChannel, *completions: Completion) -> list[float | None]:
    return [score.value for score in asyncio.run(channel.score(PROMPT, completions))]


def test_continuous_reward_by_hand() -> None:
    shape = {"target": 40.0, "width_short": 10.0, "width_long": 20.0}
    assert length_reward(40, **shape) == 1.0
    assert length_reward(30, **shape) == pytest.approx(0.6065306597)  # exp(-1/2)
    assert length_reward(60, **shape) == pytest.approx(0.6065306597)
    assert length_reward(20, **shape) == pytest.approx(0.1353352832)  # exp(-2)
    assert length_reward(0, **shape) == pytest.approx(0.000335462628)  # exp(-8)


positive = st.floats(min_value=5e-324, max_value=1e308)


@given(length=st.floats(min_value=0, max_value=1e308), target=positive, short=positive, long=positive)
@settings(deadline=None, max_examples=50)
def test_continuous_reward_is_bounded_and_never_nan(length: float, target: float, short: float, long: float) -> None:
    reward = length_reward(length, target=target, width_short=short, width_long=long)
    assert 0.0 <= reward <= 1.0


@given(a=st.integers(0, 400), b=st.integers(0, 400))
@settings(deadline=None, max_examples=50)
def test_continuous_reward_falls_away_from_the_target_on_either_side(a: int, b: int) -> None:
    nearer, farther = sorted((a, b))

    def reward(length: float) -> float:
        return length_reward(length, target=400, width_short=100, width_long=300)

    assert reward(400 + nearer) >= reward(400 + farther)
    assert reward(400 - nearer) >= reward(400 - farther)


@pytest.mark.parametrize("wrong", [{"target": 0.0}, {"width_short": 0.0}, {"width_long": -1.0}, {"target": math.nan}])
def test_continuous_reward_refuses_what_has_no_shape(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need target"):
        length_reward(1, **{"target": 1.0, "width_short": 1.0, "width_long": 1.0, **wrong})


def test_binary_reward_holds_at_the_limit_itself() -> None:
    assert [binary_length_reward(length, limit=8) for length in (0, 8, 9)] == [1.0, 1.0, 0.0]


def test_tokens_count_the_sampled_stop_token_and_characters_the_text() -> None:
    shape = {"target": 5.0, "width_short": 1.0, "width_long": 1.0}
    answer = completion(5, text="가나다라마")
    assert values(continuous_channel("l", unit="tokens", **shape), answer) == [1.0]
    assert values(continuous_channel("l", unit="characters", **shape), answer) == [1.0]
    assert values(continuous_channel("l", unit="tokens", **shape), completion(4, text="12345")) == [
        pytest.approx(math.exp(-0.5))
    ]


def test_overlong_penalty_by_hand() -> None:
    channel = overlong_channel("o", limit=100, buffer=20)
    lengths = [completion(n, finish="length") for n in (0, 80, 85, 100, 150)]
    assert values(channel, *lengths) == [0.0, 0.0, pytest.approx(-0.25), -1.0, -1.0]


def test_empty_answers_are_scored_and_aborted_ones_are_not() -> None:
    channel = binary_channel("b", limit=3, unit="tokens")
    scores = asyncio.run(channel.score(PROMPT, [completion(0), completion(2, finish="aborted")]))
    assert scores[0].value == 1.0
    assert scores[1].value is None
    assert scores[1].reason is not None
    assert "aborted" in scores[1].reason
