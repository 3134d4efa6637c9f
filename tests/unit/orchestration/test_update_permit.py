"""The optimiser moves only once it is told that the weights it would change have been sent."""

import threading

import pytest

from ullim.errors import RunFailed
from ullim.orchestration.learners import UpdatePermit


def test_an_optimiser_that_is_not_allowed_says_so_at_its_deadline() -> None:
    permit = UpdatePermit(0.01)
    permit.give(3)
    with pytest.raises(RunFailed, match="publication of version 4"):
        permit.wait(4)


@pytest.mark.parametrize("given", [4, 5])
def test_that_publication_or_a_later_one_allows_it(given: int) -> None:
    permit = UpdatePermit(0.01)
    permit.give(given)
    permit.give(2)  # word of an earlier one may come late and takes nothing back
    permit.wait(4)


def test_whoever_waits_goes_on_when_the_word_comes() -> None:
    permit = UpdatePermit(30.0)
    waiting, moved = threading.Event(), threading.Event()

    def optimiser() -> None:
        waiting.set()
        permit.wait(1)
        moved.set()

    threading.Thread(target=optimiser, daemon=True).start()
    assert waiting.wait(10.0)
    permit.give(0)
    assert not moved.is_set()
    permit.give(1)
    assert moved.wait(10.0)
