"""StalenessGate: how far generation may run ahead of training.

η = `max_staleness` and B = `groups_per_step` hold in two places.

Admission: at most (η+1)·B groups are *open*, so that samples are fresh by pacing. A ticket moves through
named states, and only the controller moves it::

    OPEN ──train(ticket, v+1)──▶ TRAINED in step v+1 ──nodes_hold(v+1)──▶ released (slot free)
      └──drop(ticket)──▶ released at once

A trained ticket keeps its slot until the nodes hold the weights it led to; otherwise a new group could be
admitted under old weights with a full window ahead of it.

Consumption: a group whose oldest token is more than η versions behind the learner is refused (`fresh`).

Why pacing is enough when groups are taken oldest first: let the nodes hold version v when a group is
admitted, and the learner version v' >= v. Of the at most (η+1)·B - 1 groups open before it, (v'-v)·B are
trained already, so at most (η+1-(v'-v))·B - 1 are ahead of it in line. It is therefore trained at learner
version v' + η - (v'-v) = v + η at the latest, and its oldest token was made by version v or newer: lag <= η.
Only a straggler overtaken by younger ready groups can be later; `fresh` catches it and the controller counts it.

A pure class: no clock, no I/O, not thread-safe (the controller is one asyncio loop).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GateCounts:
    """What the gate has seen since the run began."""

    admitted: int
    trained: int
    dropped: int


class StalenessGate:
    """See the module's docstring; B = `groups_per_step` >= 1, η = `max_staleness` >= 0."""

    def __init__(self, *, groups_per_step: int, max_staleness: int) -> None:
        if groups_per_step < 1 or max_staleness < 0:
            raise ValueError(
                f"need groups_per_step >= 1 and max_staleness >= 0, got {groups_per_step}, {max_staleness}"
            )
        self.groups_per_step = groups_per_step
        self.max_staleness = max_staleness
        self._open: set[int] = set()
        self._trained: dict[int, int] = {}  # ticket -> version its step made
        self._next_ticket = 0
        self._trained_total = 0
        self._dropped_total = 0

    @property
    def capacity(self) -> int:
        """(η+1)·B, the number of slots."""
        return (self.max_staleness + 1) * self.groups_per_step

    @property
    def held(self) -> int:
        """Slots in use: open tickets, and trained ones whose weights have not reached the nodes."""
        return len(self._open) + len(self._trained)

    @property
    def open_tickets(self) -> frozenset[int]:
        """Tickets admitted and neither trained nor dropped."""
        return frozenset(self._open)

    @property
    def counts(self) -> GateCounts:
        return GateCounts(self._next_ticket, self._trained_total, self._dropped_total)

    def can_admit(self) -> bool:
        return self.held < self.capacity

    def admit(self) -> int:
        """Take a slot and return the group's ticket; tickets rise by one in order of admission."""
        if not self.can_admit():
            raise RuntimeError(f"all {self.capacity} slots are held; ask can_admit() first")
        ticket = self._next_ticket
        self._next_ticket += 1
        self._open.add(ticket)
        return ticket

    def fresh(self, oldest_version: int, learner_version: int) -> bool:
        """May a group whose oldest token is of `oldest_version` be trained on by the learner now?"""
        return learner_version - oldest_version <= self.max_staleness

    def train(self, ticket: int, made_version: int) -> None:
        """The group went into the step that makes `made_version`; its slot waits for `nodes_hold`."""
        self._close(ticket)
        self._trained[ticket] = made_version
        self._trained_total += 1

    def drop(self, ticket: int) -> None:
        """The group will not be trained on (stale, failed, empty); its slot is free at once."""
        self._close(ticket)
        self._dropped_total += 1

    def nodes_hold(self, version: int) -> None:
        """Every serving node holds `version` or newer: free the slots of what was trained into it."""
        self._trained = {ticket: made for ticket, made in self._trained.items() if made > version}

    def state(self) -> dict[str, Any]:
        """For the checkpoint. Open tickets are left out: their prompts are generated again."""
        return {"next_ticket": self._next_ticket, "trained": self._trained_total, "dropped": self._dropped_total}

    def restore(self, state: dict[str, Any]) -> None:
        """Counters of an earlier run; every slot is free."""
        self._next_ticket = int(state["next_ticket"])
        self._trained_total = int(state["trained"])
        self._dropped_total = int(state["dropped"])
        self._open.clear()
        self._trained.clear()

    def _close(self, ticket: int) -> None:
        if ticket not in self._open:
            raise RuntimeError(f"ticket {ticket} is not open; it was never admitted, or closed twice")
        self._open.remove(ticket)
