"""WeightPublisher: one version of the policy, from the learners to every node, or a clear word who failed.

A *session* is a process group of learner rank 0 and the nodes. It is opened again whenever its members
change or a transfer fails in it, so that a failure leaves nothing behind.
"""

import asyncio
from dataclasses import dataclass

from ullim.errors import RunFailed
from ullim.orchestration.peers import LearnerDied, Learners, Node, PeerDied
from ullim.orchestration.supervisor import NodePool, Seat, SeatState
from ullim.weights.session import TransferFailed, TransferStats


@dataclass(frozen=True, slots=True)
class Publication:
    """What became of one publication."""

    version: int
    holders: tuple[str, ...]
    stats: TransferStats | None  # None if nobody was there to receive


class WeightPublisher:
    """Publishes to every node that is up (JOINING or SERVING); one publication at a time."""

    def __init__(self, learners: Learners, pool: NodePool, *, attempts: int, deadline_s: float) -> None:
        self._learners = learners
        self._pool = pool
        self._attempts = attempts
        self._deadline_s = deadline_s
        self._session: dict[str, Node] = {}
        self._turn = asyncio.Lock()
        self.failures = 0

    async def publish(self, version: int) -> Publication:
        """Send the learners' parameters, which are those of `version` until it returns, to all nodes.

        A node that fails is left out and restarted, and the transfer is tried again with the others; after
        `attempts` failures RunFailed says who failed and why.
        """
        async with self._turn:
            reasons: list[str] = []
            while len(reasons) < self._attempts:
                seats = {seat: seat.node for seat in self._pool.in_state(SeatState.JOINING, SeatState.SERVING)}
                members = {seat: node for seat, node in seats.items() if node is not None}
                if not members:
                    return Publication(version, (), None)
                try:
                    stats = await self._transfer(members, version)
                except LearnerDied:
                    raise
                except (TransferFailed, PeerDied, TimeoutError) as error:
                    self.failures += 1
                    self._session = {}
                    reasons.append(str(error) or type(error).__name__)
                    await self._bury(members, error)
                    continue
                for seat, node in members.items():
                    if seat.node is node:
                        self._pool.serving(seat, version)
                return Publication(version, tuple(seat.name for seat in members), stats)
            raise RunFailed(
                f"weights of version {version} reached no agreement in {self._attempts} tries: " + "; ".join(reasons)
            )

    async def _transfer(self, members: dict[Seat, Node], version: int) -> TransferStats:
        by_name = {seat.name: node for seat, node in members.items()}
        async with asyncio.timeout(5 * self._deadline_s):
            if by_name != self._session:
                addresses = await self._learners.open_session(list(by_name))
                await _all(*(node.join(addresses[name], self._learners.manifest) for name, node in by_name.items()))
                self._session = by_name
            results = await _all(self._learners.publish(version), *(node.receive(version) for node in by_name.values()))
        stats = results[0]
        assert isinstance(stats, TransferStats)
        return stats

    async def _bury(self, members: dict[Seat, Node], error: BaseException) -> None:
        """Find out which members are dead: the error may name them, and a live node answers."""
        blamed = set(error.peers) if isinstance(error, TransferFailed) else set()

        async def probe(seat: Seat, node: Node) -> None:
            try:
                await asyncio.wait_for(node.counters(), min(10.0, self._deadline_s))
            except (PeerDied, TimeoutError) as silence:
                self._pool.died(seat, node, f"{silence or 'no answer'} during a weight transfer")
            else:
                if seat.name in blamed:
                    self._pool.died(seat, node, f"it stalled a weight transfer: {error}")

        await asyncio.gather(*(probe(seat, node) for seat, node in members.items()))


async def _all(*calls: object) -> list[object]:
    """Await every call to its end, then raise the first failure: nobody is left receiving into the void."""
    results = await asyncio.gather(*calls, return_exceptions=True)  # type: ignore[call-overload]
    failures = [result for result in results if isinstance(result, BaseException)]
    # A transport error names peers and is worth more than the echo that the others report.
    failures.sort(key=lambda failure: not isinstance(failure, PeerDied))
    if failures:
        raise failures[0]
    return list(results)
