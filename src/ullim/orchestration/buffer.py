"""RolloutBuffer: finished groups waiting for the learner, oldest ticket first.

It never holds more groups than the gate has slots, so it needs no bound of its own. A pure class.
"""

from collections.abc import Callable

from ullim.records import RolloutGroup


class RolloutBuffer:
    """Groups by ticket. `fresh(oldest_version, learner_version)` is the gate's rule at consumption."""

    def __init__(self, fresh: Callable[[int, int], bool]) -> None:
        self._fresh = fresh
        self._ready: dict[int, RolloutGroup] = {}

    def __len__(self) -> int:
        return len(self._ready)

    @property
    def tickets(self) -> frozenset[int]:
        return frozenset(self._ready)

    def put(self, group: RolloutGroup) -> None:
        """Hold a group that has at least one token."""
        if group.ticket in self._ready:
            raise RuntimeError(f"ticket {group.ticket} is already in the buffer; a group was delivered twice")
        if group.oldest_version is None:
            raise RuntimeError(f"ticket {group.ticket} has no token; an empty group is dropped, not buffered")
        self._ready[group.ticket] = group

    def discard_stale(self, learner_version: int) -> list[RolloutGroup]:
        """Remove and return, oldest first, every group that may no longer be trained on.

        To be called whenever the learner's version rises or a group is put: stale groups that stayed would
        hold their slots and could starve the run.
        """
        stale = [self._ready[t] for t in sorted(self._ready) if not self._is_fresh(self._ready[t], learner_version)]
        for group in stale:
            del self._ready[group.ticket]
        return stale

    def take(self, count: int, learner_version: int) -> list[RolloutGroup]:
        """Remove and return the `count` oldest groups; fewer if fewer are held.

        Raises RuntimeError if one of them is too old: the freshness bound, asserted where it matters.
        """
        groups = [self._ready[ticket] for ticket in sorted(self._ready)[:count]]
        for group in groups:
            if not self._is_fresh(group, learner_version):
                raise RuntimeError(
                    f"ticket {group.ticket} has tokens of version {group.oldest_version} and the learner is at "
                    f"{learner_version}: discard_stale was not called"
                )
        for group in groups:
            del self._ready[group.ticket]
        return groups

    def _is_fresh(self, group: RolloutGroup, learner_version: int) -> bool:
        oldest = group.oldest_version
        return oldest is not None and self._fresh(oldest, learner_version)
