"""The sender's view of its receivers: who has joined, who has answered, who is behind, and who is to blame.

    AWAITED --hello--> JOINED --connection closed--> LOST
                          |
                          +--fault--> FAULTY   (it says why; `echo` if it only saw another's failure)

One thread at a time: everything is read while the sender waits for something, so there is no reader thread and no lock.
"""

import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ullim.errors import BadInput
from ullim.weights.lines import Line, LineClosed, Message, listen, readable
from ullim.weights.session import SessionAddress, TransferFailed

GRACE_S = 2.0
"""How long to look for the culprit once something broke: what a live receiver may take to answer."""


@dataclass(slots=True)
class Member:
    """One receiver. `chunks` counts those of the running transfer that it says it has."""

    line: Line | None = None
    lost: str | None = None
    fault: str | None = None
    echo: str | None = None
    chunks: int = 0
    answers: dict[str, Message] = field(default_factory=dict)  # by kind, since the last `begin`


class Roster:
    """Joins receivers by name and follows them through every transfer of a session."""

    def __init__(self, sender: str, host: str, port: int, receivers: Sequence[str], deadline_s: float) -> None:
        if not receivers or len(set(receivers)) != len(receivers) or sender in receivers:
            raise BadInput(f"weights: a session needs distinct receiver names, got {list(receivers)} for {sender!r}")
        if host in ("", "0.0.0.0", "::"):
            raise BadInput(f"weights: bind is {host!r}; give one address of this machine that the nodes can reach")
        self.members = {name: Member() for name in receivers}
        self._deadline_s = deadline_s
        self._strangers: list[Line] = []
        self._doing = "joining"
        try:
            self._listener: socket.socket | None = listen(host, port, backlog=2 * len(receivers) + 8)
        except OSError as error:
            raise BadInput(f"weights: cannot listen on bind {host!r}, port {port}: {error}") from error
        bound = self._listener.getsockname()[1]
        session = secrets.token_hex(8)
        self.addresses = {
            name: SessionAddress(host, bound, session, sender, name, rank)
            for rank, name in enumerate(receivers, start=1)
        }

    def join(self) -> None:
        """Wait until every receiver has joined, then let nobody else in. TransferFailed names who did not come.

        A receiver that goes away again before all are there may come back.
        """
        until = time.monotonic() + self._deadline_s
        while missing := [name for name, member in self.members.items() if member.line is None]:
            if time.monotonic() >= until:
                raise TransferFailed(
                    f"weights: {', '.join(missing)} did not join within {self._deadline_s:g} s", missing
                )
            self.service(until - time.monotonic())
        self._stop_listening()

    def begin(self, doing: str) -> None:
        """Forget the answers of what came before; `doing` is how errors will call what comes now."""
        self._doing = doing
        for member in self.members.values():
            member.answers.clear()
            member.chunks = 0

    def tell(self, kind: str, **fields: object) -> None:
        """Say one thing to every receiver that is there; one that is gone is marked LOST."""
        for member in self.members.values():
            if member.line is not None:
                try:
                    member.line.say(kind, **fields)
                except LineClosed as error:
                    self._lose(member, error)

    def expect(self, kind: str) -> dict[str, Message]:
        """Wait until all have answered with `kind`. The deadline runs from the last message heard from any of them.

        A receiver that has answered may leave: its weights are confirmed, and the others' do not depend on it.
        """
        last = time.monotonic()
        while silent := [name for name, member in self.members.items() if kind not in member.answers]:
            self._check(silent)
            left = last + self._deadline_s - time.monotonic()
            if left <= 0:
                raise self._failure(dict.fromkeys(silent, f"no {kind!r} within {self._deadline_s:g} s"))
            if self.service(left):
                last = time.monotonic()
        return {name: member.answers[kind] for name, member in self.members.items()}

    def service(self, timeout_s: float) -> bool:
        """Read what receivers have said, waiting at most so long for the first word. True if anything was read."""
        lines = [*self._strangers, *(member.line for member in self.members.values() if member.line is not None)]
        listening = [] if self._listener is None else [self._listener]
        ready = readable([*listening, *lines], timeout_s)
        for end in ready:
            if isinstance(end, socket.socket):
                self._accept(end)
            elif end in self._strangers:
                self._introduce(end)
        for member in self.members.values():
            if member.line is not None and member.line in ready:
                self._listen_to(member, member.line)
        return bool(ready)

    def look(self) -> None:
        """Read what has been said, without waiting; TransferFailed if a receiver is lost or has reported a fault."""
        self.service(0.0)
        self._check(list(self.members))

    def blame(self, trouble: str) -> TransferFailed:
        """The error for `trouble` in the stream, naming who caused it.

        A culprit shows in a moment: its line closes, or it says what went wrong. Failing that, whoever waits for the
        stream answers a ping, and whoever is stuck, stopped or busy elsewhere does not; so those who only wait behind
        another in the broadcast are not blamed.
        """
        self.tell("ping")
        until = time.monotonic() + GRACE_S
        while not any(member.lost or member.fault for member in self.members.values()):
            if time.monotonic() >= until:
                mute = [name for name, member in self.members.items() if "pong" not in member.answers]
                return self._failure(dict.fromkeys(mute or self._furthest_behind(), trouble))
            self.service(until - time.monotonic())
        return self._failure({})

    def close(self, reason: str, peers: Sequence[str], linger_s: float) -> None:
        """Tell everybody why the session ends, then hang up once they have, or after `linger_s`.

        A connection that is closed with words unread is reset, and the reason would be lost with it.
        """
        self.tell("abort", reason=reason, peers=list(peers))
        until = time.monotonic() + linger_s
        while any(member.line is not None for member in self.members.values()) and time.monotonic() < until:
            self.service(until - time.monotonic())
        self._stop_listening()
        for member in self.members.values():
            if member.line is not None:
                member.line.close()
                member.line = None

    def _check(self, names: Sequence[str]) -> None:
        members = [self.members[name] for name in names]
        if any(member.lost or member.fault for member in members):
            raise self._failure({})
        if any(member.echo for member in members):
            raise self.blame("a connection broke")

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.settimeout(self._deadline_s)  # bounds `say` to a receiver that reads nothing
        self._strangers.append(Line(connection))

    def _introduce(self, line: Line) -> None:
        try:
            hello = line.hear()
            if hello is None:
                return
            self._strangers.remove(line)
            name = str(hello.get("name"))
            member = self.members.get(name)
            if hello["kind"] == "hello" and member is not None and hello.get("session") == self.addresses[name].session:
                if member.line is None:
                    member.line, member.lost = line, None
                    return
                refusal = f"{name} has joined already"
            else:
                refusal = f"{name} is not expected in this session"
            line.say("refused", reason=refusal)
        except LineClosed:
            if line in self._strangers:
                self._strangers.remove(line)
        line.close()

    def _listen_to(self, member: Member, line: Line) -> None:
        try:
            while (message := line.hear()) is not None:
                match message["kind"]:
                    case "chunk":
                        member.chunks = message["chunks"]
                    case "fault" if message["echo"]:
                        member.echo = message["reason"]
                    case "fault":
                        member.fault = message["reason"]
                    case kind:
                        member.answers[kind] = message
        except LineClosed as error:
            self._lose(member, error)

    def _lose(self, member: Member, error: LineClosed) -> None:
        if member.line is not None:
            member.line.close()
            member.line = None
        # A receiver that reported a fault hangs up next; its own words say more than the closed line.
        if member.fault is None and member.echo is None:
            member.lost = str(error)

    def _furthest_behind(self) -> list[str]:
        least = min(member.chunks for member in self.members.values())
        return [name for name, member in self.members.items() if member.chunks == least]

    def _failure(self, accused: dict[str, str]) -> TransferFailed:
        for name, member in self.members.items():
            if member.fault:
                accused[name] = member.fault
            elif member.lost:
                accused[name] = f"is gone ({member.lost})"
        told = "; ".join(
            f"{name}: {charge} (had {self.members[name].chunks} chunks)" for name, charge in accused.items()
        )
        return TransferFailed(f"weights: {self._doing} failed: {told}", list(accused))

    def _stop_listening(self) -> None:
        for end in (self._listener, *self._strangers):
            if end is not None:
                end.close()
        self._listener = None
        self._strangers = []
