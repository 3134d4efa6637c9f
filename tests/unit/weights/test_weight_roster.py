"""Who is to blame, decided from control lines alone."""

import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from ullim.weights import roster
from ullim.weights.lines import Line, LineClosed, connect
from ullim.weights.roster import Roster
from ullim.weights.session import TransferFailed

NAMES = ("a", "b", "c")


@pytest.fixture(autouse=True)
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "GRACE_S", 0.5)


@pytest.fixture
def group() -> Iterator[tuple[Roster, dict[str, Line]]]:
    """A sender's roster whose three receivers have joined, and the receivers' ends of the lines."""
    own = Roster("learner", "127.0.0.1", 0, NAMES, deadline_s=10.0)
    lines = {}
    for name, address in own.addresses.items():
        lines[name] = connect(address.host, address.port, 10.0)
        lines[name].say("hello", name=name, session=address.session)
    own.join()
    own.begin("the test")
    yield own, lines
    own.close("done", (), linger_s=0.0)
    for line in lines.values():
        line.close()


def answer_pings(*lines: Line) -> None:
    """What a receiver does that waits for the stream, until its line closes."""

    def answer(line: Line) -> None:
        with suppress(LineClosed):
            while (message := line.hear(10.0)) is not None:
                if message["kind"] == "ping":
                    line.say("pong")

    for line in lines:
        threading.Thread(target=answer, args=(line,), daemon=True).start()


def test_of_those_equally_far_only_the_one_that_does_not_answer_is_blamed(
    group: tuple[Roster, dict[str, Line]],
) -> None:
    own, lines = group
    answer_pings(lines["a"], lines["c"])
    error = own.blame("nothing moves")
    assert error.peers == ("b",)
    assert "the test failed: b: nothing moves" in str(error)


def test_where_all_answer_the_furthest_behind_is_blamed(group: tuple[Roster, dict[str, Line]]) -> None:
    own, lines = group
    for name, chunks in (("a", 3), ("b", 2), ("c", 1)):
        lines[name].say("chunk", chunks=chunks)
    answer_pings(*lines.values())
    assert own.blame("nothing moves").peers == ("c",)


def test_the_dead_are_blamed_rather_than_those_who_saw_a_connection_break(
    group: tuple[Roster, dict[str, Line]],
) -> None:
    own, lines = group
    lines["a"].say("fault", reason="the connection broke", echo=True)
    lines["c"].say("fault", reason="the connection broke", echo=True)
    threading.Timer(0.1, lines["b"].close).start()
    with pytest.raises(TransferFailed, match="b: is gone") as failed:
        own.expect("ready")
    assert failed.value.peers == ("b",)


def test_a_fault_of_its_own_is_told_in_the_receiver_s_words(group: tuple[Roster, dict[str, Line]]) -> None:
    own, lines = group
    lines["b"].say("fault", reason="out of memory", echo=False)
    lines["b"].close()
    with pytest.raises(TransferFailed, match="b: out of memory") as failed:
        own.expect("ready")
    assert failed.value.peers == ("b",)


def test_who_has_answered_may_leave_and_who_has_not_may_not(group: tuple[Roster, dict[str, Line]]) -> None:
    own, lines = group
    lines["a"].say("confirm")
    lines["a"].close()
    while own.members["a"].lost is None:
        own.service(5.0)
    lines["b"].say("confirm")
    lines["c"].say("confirm")
    assert set(own.expect("confirm")) == set(NAMES)
    own.begin("the next")
    with pytest.raises(TransferFailed, match="the next failed: a: is gone"):
        own.expect("ready")


def test_a_receiver_may_come_back_before_all_have_joined() -> None:
    own = Roster("learner", "127.0.0.1", 0, ["a", "b"], deadline_s=10.0)
    address = own.addresses["a"]
    first = connect(address.host, address.port, 10.0)
    first.say("hello", name="a", session=address.session)
    own.service(5.0)  # its connection
    own.service(5.0)  # its hello
    assert own.members["a"].line is not None
    first.close()
    own.service(5.0)
    assert own.members["a"].line is None
    again = [connect(address.host, address.port, 10.0) for _ in range(2)]
    for name, line in zip(("a", "b"), again, strict=True):
        line.say("hello", name=name, session=address.session)
    own.join()
    own.begin("the test")
    for line in again:
        line.say("here")
    assert set(own.expect("here")) == {"a", "b"}
    own.close("done", (), linger_s=0.0)


def test_a_second_one_of_the_same_name_is_turned_away() -> None:
    own = Roster("learner", "127.0.0.1", 0, ["a", "b"], deadline_s=10.0)
    address = own.addresses["a"]
    twins = [connect(address.host, address.port, 10.0) for _ in range(2)]
    for line in twins:
        line.say("hello", name="a", session=address.session)
    refusal = None
    while refusal is None:
        own.service(5.0)
        for line in twins:
            with suppress(LineClosed):
                refusal = refusal or line.hear()
    assert refusal == {"kind": "refused", "reason": "a has joined already"}
    own.close("done", (), linger_s=0.0)
