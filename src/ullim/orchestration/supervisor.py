"""NodePool: the inference nodes, who serves, who is being started again.

A node's seat moves through named states; only the pool moves it::

    STARTING ──launched──▶ JOINING ──holds current weights──▶ SERVING
        ▲                                                        │ died
        └────────── restart, within `restarts` ◀──────── (any state but LOST)
                                                     beyond it: LOST, and with the last seat the run

A node serves only once the publisher has given it the current weights, so no prompt is answered by a stale
model after a restart.
"""

import asyncio
import enum
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from ullim.errors import RunFailed
from ullim.orchestration.changes import Changes, within
from ullim.orchestration.peers import Node, PeerDied, RolloutTask
from ullim.records import RolloutGroup

START_DEADLINE_S = 600.0
"""For a process to load its model: minutes for a large one from a cold disk."""

Launch = Callable[[str], Awaitable[Node]]


class SeatState(enum.Enum):
    STARTING = "starting"
    JOINING = "joining"
    SERVING = "serving"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Seat:
    """One node's place in the pool; the process in it may change."""

    name: str
    state: SeatState = SeatState.STARTING
    node: Node | None = None
    version: int = -1
    deaths: int = 0
    in_flight: set[int] = field(default_factory=set)  # tickets


class NodePool:
    """Starts `names` by `launch`, restarts each at most `restarts` times, and picks who gets the next group."""

    def __init__(
        self,
        names: list[str],
        launch: Launch,
        *,
        restarts: int,
        changes: Changes,
        note: Callable[[str], None],
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        self.seats = {name: Seat(name) for name in names}
        self._launch = launch
        self._restarts = restarts
        self._changes = changes
        self._note = note
        self._start_deadline_s = start_deadline_s
        self._restarting: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Launch every node side by side; the first failure is raised."""
        await asyncio.gather(*(self._occupy(seat) for seat in self.seats.values()))

    def in_state(self, *states: SeatState) -> list[Seat]:
        return [seat for seat in self.seats.values() if seat.state in states]

    def pick(self) -> Seat | None:
        """The serving node with the fewest groups in flight, None while nobody serves."""
        return min(self.in_state(SeatState.SERVING), key=lambda seat: len(seat.in_flight), default=None)

    async def rollout(self, seat: Seat, task: RolloutTask) -> RolloutGroup:
        """Have `seat` answer `task`. PeerDied once its node is gone; the seat is then being refilled."""
        node = seat.node
        if node is None:
            raise PeerDied(seat.name, "it is being restarted")
        seat.in_flight.add(task.ticket)
        try:
            return await node.rollout(task)
        except PeerDied as death:
            self.died(seat, node, str(death))
            raise
        finally:
            seat.in_flight.discard(task.ticket)

    def serving(self, seat: Seat, version: int) -> None:
        """The publisher's word that the seat's node holds `version`."""
        seat.state, seat.version = SeatState.SERVING, version
        self._changes.notify()

    def died(self, seat: Seat, node: Node, detail: str) -> None:
        """Called by whoever notices first; later callers find another node in the seat, or none."""
        if seat.node is not node:
            return
        seat.node, seat.version = None, -1
        node.kill()
        if self._bury(seat, detail):
            restart = asyncio.create_task(self._refill(seat), name=f"restart {seat.name}")
            restart.add_done_callback(lambda _: self._changes.notify())
            self._restarting[seat.name] = restart
        self._changes.notify()

    @property
    def failed(self) -> bool:
        """Something that `check` would raise has happened."""
        lost = all(seat.state is SeatState.LOST for seat in self.seats.values())
        return lost or any(t.done() and t.exception() is not None for t in self._restarting.values())

    def check(self) -> None:
        """Raise what ended a restart, or RunFailed once no node can ever serve again."""
        for name, task in list(self._restarting.items()):
            if task.done():
                del self._restarting[name]
                if (error := task.exception()) is not None:
                    raise error
        if all(seat.state is SeatState.LOST for seat in self.seats.values()):
            raise RunFailed(
                f"no inference node is left: {', '.join(self.seats)} died more than {self._restarts} times each; "
                f"their last words are in the log above (raise nodes.restarts only if the cause is outside)"
            )

    async def close(self) -> None:
        """End every node; one that does not answer is killed."""
        for task in self._restarting.values():
            task.cancel()
        await asyncio.gather(*(self._close(seat) for seat in self.seats.values()))

    def _bury(self, seat: Seat, detail: str) -> bool:
        """Count a death; True if the seat may be filled again."""
        seat.deaths += 1
        if seat.deaths > self._restarts:
            seat.state = SeatState.LOST
            self._note(f"{seat.name} died for good after {self._restarts} restarts: {detail}")
            return False
        seat.state = SeatState.STARTING
        self._note(
            f"{seat.name} died ({detail}); {len(seat.in_flight)} groups go to other nodes; "
            f"restart {seat.deaths} of {self._restarts}"
        )
        return True

    async def _refill(self, seat: Seat) -> None:
        """Start the seat's node again, also if it dies while it starts."""
        while True:
            try:
                return await self._occupy(seat)
            except PeerDied as death:
                if not self._bury(seat, str(death)):
                    return None

    async def _occupy(self, seat: Seat) -> None:
        node = await within(self._start_deadline_s, self._launch(seat.name), f"{seat.name} did not start")
        seat.node, seat.state = node, SeatState.JOINING
        if seat.deaths:
            self._note(f"{seat.name} is back and waits for the current weights")
        self._changes.notify()

    async def _close(self, seat: Seat) -> None:
        if seat.node is None:
            return
        try:
            await asyncio.wait_for(seat.node.close(), 10.0)
        except (TimeoutError, PeerDied):
            self._note(f"{seat.name} did not close within 10 s and was killed")
        seat.node.kill()
        seat.node = None
