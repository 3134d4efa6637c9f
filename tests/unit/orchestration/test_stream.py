"""Each prompt position once, whatever is given back, dropped or interrupted."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.orchestration.stream import EncodedPrompt, PromptStream
from ullim.records import Message, Prompt


def prompts(count: int) -> list[EncodedPrompt]:
    return [(f"p{i}", (Message("user", str(i)),), np.array([i], dtype=np.int32)) for i in range(count)]


def stream(
    count: int, *, epochs: int | None = 1, shuffle: bool = True, retries: int = 1, seed: int = 0
) -> PromptStream:
    return PromptStream(prompts(count), seed=seed, shuffle=shuffle, epochs=epochs, retries=retries)


def drain(source: PromptStream) -> list[Prompt]:
    taken = []
    while (prompt := source.next()) is not None:
        taken.append(prompt)
    return taken


def test_an_epoch_shows_every_prompt_once_and_the_next_in_another_order() -> None:
    taken = drain(stream(50, epochs=2))
    first, second = [p.prompt_id for p in taken[:50]], [p.prompt_id for p in taken[50:]]
    assert sorted(first) == sorted(second) == sorted(f"p{i}" for i in range(50))
    assert first != second
    assert [p.position for p in taken] == list(range(100))


def test_unshuffled_is_the_order_of_the_file() -> None:
    assert [p.prompt_id for p in drain(stream(3, shuffle=False))] == ["p0", "p1", "p2"]


def test_a_given_back_prompt_comes_next_until_its_retries_are_used_up() -> None:
    source = stream(3, retries=1)
    first = source.next()
    assert first is not None
    assert source.give_back(first)
    again = source.next()
    assert again is not None
    assert again.position == first.position
    assert source.tries(again) == 1
    assert not source.give_back(again)


def test_finishing_twice_is_an_error() -> None:
    source = stream(2)
    first = source.next()
    assert first is not None
    source.done(first)
    with pytest.raises(RuntimeError, match="finished twice"):
        source.done(first)


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_resumed_at_any_moment_every_position_is_done_exactly_once(data: st.DataObject) -> None:
    count, epochs = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    source = stream(count, epochs=epochs, retries=100)
    in_flight: list[Prompt] = []
    finished: list[tuple[int, str]] = []
    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["next", "done", "back", "resume"])):
            case "next":
                if (prompt := source.next()) is not None:
                    in_flight.append(prompt)
            case "done" if in_flight:
                prompt = in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1)))
                source.done(prompt)
                finished.append((prompt.position, prompt.prompt_id))
            case "back" if in_flight:
                assert source.give_back(in_flight.pop(data.draw(st.integers(0, len(in_flight) - 1))))
            case "resume":
                state = json.loads(json.dumps(source.state()))
                source = stream(count, epochs=epochs, retries=100)
                source.restore(state)
                in_flight.clear()
    for prompt in [*in_flight, *drain(source)]:
        source.done(prompt)
        finished.append((prompt.position, prompt.prompt_id))
    assert sorted(position for position, _ in finished) == list(range(count * epochs))
    uninterrupted = [(p.position, p.prompt_id) for p in drain(stream(count, epochs=epochs))]
    assert sorted(finished) == uninterrupted
    assert source.state()["watermark"] == count * epochs
