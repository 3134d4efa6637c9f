"""The control line between the sender and one receiver: small JSON messages over a TCP connection of its own.

The bytes of the weights never pass here. What the line is for: the operating system closes it the moment a process
dies, so the other end knows who died at once, which a broadcast over many hops cannot tell.
"""

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


class LineClosed(Exception):
    """The other end is gone, or speaks something else. Caught in this room and turned into TransferFailed."""


@dataclass(slots=True)
class Line:
    """One end of a control line. Not for use by two threads at once."""

    connection: socket.socket
    _partial: bytearray = field(default_factory=bytearray)
    _heard: deque[Message] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self.connection.fileno()

    def say(self, kind: str, **fields: Any) -> None:
        """Send one message; LineClosed if the other end is gone or takes nothing within the socket's time limit."""
        try:
            self.connection.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")
        except OSError as error:
            raise LineClosed(str(error) or type(error).__name__) from error

    def hear(self, timeout_s: float = 0.0) -> Message | None:
        """The next message, None if none came in time; LineClosed once all that was said before the end is read."""
        until = time.monotonic() + timeout_s
        while not self._heard:
            if not readable([self], until - time.monotonic()):
                return None
            self._read()
        return self._heard.popleft()

    def close(self) -> None:
        self.connection.close()

    def _read(self) -> None:
        try:
            data = self.connection.recv(1 << 16)
        except OSError as error:
            raise LineClosed(str(error)) from error
        if not data:
            raise LineClosed("connection closed")
        self._partial += data
        *whole, rest = self._partial.split(b"\n")
        self._partial = bytearray(rest)
        try:
            messages = [json.loads(line) for line in whole]
        except ValueError as error:
            raise LineClosed("not a control line of ours") from error
        if not all(isinstance(message, dict) and "kind" in message for message in messages):
            raise LineClosed("not a control line of ours")
        self._heard.extend(messages)


def listen(host: str, port: int, backlog: int) -> socket.socket:
    """A listening socket on this interface only; port 0 takes a free one. OSError where that cannot be."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener


def connect(host: str, port: int, deadline_s: float) -> Line:
    """A line to the sender; LineClosed where nobody answers there within the deadline."""
    try:
        return Line(socket.create_connection((host, port), timeout=deadline_s))
    except OSError as error:
        raise LineClosed(str(error)) from error


def readable(ends: Sequence[Line | socket.socket], timeout_s: float) -> list[Line | socket.socket]:
    """Those of `ends` that have something to read or were closed, waiting for the first at most so long."""
    with selectors.DefaultSelector() as selector:  # select() itself fails on descriptors above 1023
        for end in ends:
            selector.register(end, selectors.EVENT_READ)
        ready = {key.fd for key, _ in selector.select(max(0.0, timeout_s))}
    return [end for end in ends if end.fileno() in ready]
