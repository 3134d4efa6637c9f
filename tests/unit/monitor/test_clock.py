import contextlib

import pytest

from ullim.monitor.clock import BusyClock, BusyCounter, StageTimes


class Hand:
    """A clock moved by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hand() -> Hand:
    return Hand()


def test_share_of_a_window_cuts_intervals_at_its_edge(hand: Hand) -> None:
    clock = BusyClock(clock=hand)
    with clock.busy():
        hand.now += 6
    hand.now += 4
    assert clock.share(10) == pytest.approx(0.6)
    assert clock.share(5) == pytest.approx(1 / 5)
    assert clock.share(4) == 0
    assert clock.share(600) == pytest.approx(0.6)  # only ten seconds have passed since the start


def test_work_in_progress_counts(hand: Hand) -> None:
    clock = BusyClock(clock=hand)
    hand.now += 2
    with clock.busy():
        hand.now += 6
        assert clock.share(10) == pytest.approx(6 / 8)
        assert clock.share(3) == 1.0


def test_nested_work_counts_once_and_an_error_ends_it(hand: Hand) -> None:
    clock = BusyClock(clock=hand)
    with clock.busy(), contextlib.suppress(KeyError), clock.busy():
        hand.now += 2
        raise KeyError
    with contextlib.suppress(KeyError), clock.busy():
        hand.now += 1
        raise KeyError
    hand.now += 3
    assert clock.share(6) == pytest.approx(0.5)


def test_take_is_since_the_last_take(hand: Hand) -> None:
    clock = BusyClock(clock=hand)
    assert clock.take() == 0.0
    with clock.busy():
        hand.now += 3
        assert clock.take() == 1.0
        hand.now += 1
    hand.now += 3
    assert clock.take() == pytest.approx(0.25)


def test_old_intervals_are_forgotten_and_longer_windows_refused(hand: Hand) -> None:
    clock = BusyClock(history_s=10, clock=hand)
    for _ in range(1000):
        with clock.busy():
            hand.now += 1
        hand.now += 1
    assert len(clock._intervals) <= 7
    assert clock.share(10) == pytest.approx(0.5)
    assert clock.take() == pytest.approx(0.5)
    with pytest.raises(ValueError, match="window_s"):
        clock.share(11)


def test_counter_of_a_worker_that_is_restarted(hand: Hand) -> None:
    counter = BusyCounter(clock=hand)
    hand.now += 10
    assert counter.take(5.0) == pytest.approx(0.5)
    hand.now += 10
    assert counter.take(2.0) == pytest.approx(0.2)  # it counts from 0 again
    hand.now += 10
    assert counter.take(12.5) == 1.0
    assert counter.take(13.0) == 0.0  # no time has passed


def test_stages_add_up_and_start_afresh(hand: Hand) -> None:
    times = StageTimes(clock=hand)
    for seconds in (1, 2):
        with times.stage("train"):
            hand.now += seconds
    with contextlib.suppress(KeyError), times.stage("publish"):
        hand.now += 4
        raise KeyError
    times.add("score", 0.5)
    assert times.take() == {"timing/train": 3.0, "timing/publish": 4.0, "timing/score": 0.5}
    assert times.take() == {}
