"""Who computes what: one batch cut into optimiser updates, ranks and micro-batches.

Every rank holds the whole batch and cuts it by the same rule, so no rank needs to be told its part. A *piece* is one
prompt with some or all completions of its group; pieces are what is moved about, because a group that stays together
has its prompt computed once. Only where a whole group would leave ranks idle or overflow a micro-batch is it split, and
then the prompt is computed again. Nothing here changes the loss: its denominators are counted over the whole update.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ullim.records import Sequence

MAX_IMBALANCE = 1.15
"""Largest load of a rank over the mean that is accepted before groups are split: all ranks wait for the slowest, while
a split costs one more computation of a prompt."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One prompt and some of its completions. `members` are places in the batch, in batch order, at least one."""

    group: int
    prompt_tokens: int
    members: tuple[int, ...]
    member_tokens: tuple[int, ...]  # completion tokens of each member

    @property
    def tokens(self) -> int:
        """Tokens that this piece is charged for: the prompt once, and every completion."""
        return self.prompt_tokens + sum(self.member_tokens)

    def halves(self) -> tuple["Piece", "Piece"]:
        """Two pieces with about half of the completion tokens each; needs at least two members."""
        best, left_tokens, total = 1, 0, sum(self.member_tokens)
        for cut in range(1, len(self.members)):
            left_tokens += self.member_tokens[cut - 1]
            best = cut
            if 2 * left_tokens >= total:
                break
        return self._slice(0, best), self._slice(best, len(self.members))

    def _slice(self, start: int, stop: int) -> "Piece":
        return Piece(self.group, self.prompt_tokens, self.members[start:stop], self.member_tokens[start:stop])

    def joined(self, other: "Piece") -> "Piece":
        """This piece and another of the same group as one, members in batch order."""
        pairs = sorted(zip(self.members + other.members, self.member_tokens + other.member_tokens, strict=True))
        return Piece(self.group, self.prompt_tokens, tuple(m for m, _ in pairs), tuple(t for _, t in pairs))


MicroBatch = tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """One optimiser update. `ranks[r]` are the micro-batches of rank r; all ranks have equally many, the last ones of
    some may be empty, because every forward and backward pass is a collective of all ranks."""

    members: tuple[int, ...]  # every sequence of the update, in batch order
    ranks: tuple[tuple[MicroBatch, ...], ...]


def cut_batch(
    sequences: SequenceOf[Sequence], *, updates: int, ranks: int, micro_batch_tokens: int
) -> tuple[Update, ...]:
    """Cut a batch into `updates` shares of its groups, each over `ranks`, each rank's part into micro-batches.

    Shares are equal in groups (they differ by at most one where the number is not divisible) and groups keep their
    order. A single completion that exceeds `micro_batch_tokens` with its prompt is a micro-batch of its own, since a
    sequence is never cut. An update without a group is left out.
    """
    groups = _pieces_by_group(sequences)
    shares = [groups[len(groups) * u // updates : len(groups) * (u + 1) // updates] for u in range(updates)]
    cut = []
    for share in shares:
        if not share:
            continue
        parts = [_micro_batches(part, micro_batch_tokens) for part in _over_ranks(share, ranks)]
        longest = max(len(part) for part in parts)
        padded = tuple(part + ((),) * (longest - len(part)) for part in parts)
        cut.append(Update(tuple(sorted(m for piece in share for m in piece.members)), padded))
    return tuple(cut)


def _pieces_by_group(sequences: SequenceOf[Sequence]) -> list[Piece]:
    members: dict[int, list[int]] = {}
    for place, sequence in enumerate(sequences):
        members.setdefault(sequence.group, []).append(place)
    return [
        Piece(
            group,
            len(sequences[places[0]].prompt_ids),
            tuple(places),
            tuple(len(sequences[place].token_ids) for place in places),
        )
        for group, places in members.items()
    ]


def _over_ranks(pieces: list[Piece], ranks: int) -> list[list[Piece]]:
    """Pieces by rank: largest first to the least loaded, splitting the largest until the loads are even enough."""
    while True:
        parts: list[list[Piece]] = [[] for _ in range(ranks)]
        loads = [0] * ranks
        for piece in sorted(pieces, key=lambda p: (-p.tokens, p.members)):
            rank = loads.index(min(loads))
            parts[rank].append(piece)
            loads[rank] += piece.tokens
        if max(loads) * ranks <= MAX_IMBALANCE * sum(loads):
            break
        heaviest = parts[loads.index(max(loads))]
        splittable = [piece for piece in heaviest if len(piece.members) > 1]
        if not splittable:
            break
        largest = max(splittable, key=lambda p: (p.tokens, p.members))
        pieces = [piece for piece in pieces if piece is not largest] + list(largest.halves())
    return [_rejoined(part) for part in parts]


def _rejoined(pieces: list[Piece]) -> list[Piece]:
    """Pieces of one group that ended up on one rank become one again, or their prompt would be computed twice."""
    whole: dict[int, Piece] = {}
    for piece in pieces:
        known = whole.get(piece.group)
        whole[piece.group] = piece if known is None else known.joined(piece)
    return sorted(whole.values(), key=lambda p: p.members)


def _micro_batches(pieces: list[Piece], budget: int) -> tuple[MicroBatch, ...]:
    """Each piece into the first micro-batch with room; one that fits no empty micro-batch is split first."""
    batches: list[list[Piece]] = []
    room: list[int] = []
    waiting = list(reversed(pieces))
    while waiting:
        piece = waiting.pop()
        if piece.tokens > budget and len(piece.members) > 1:
            waiting.extend(reversed(piece.halves()))
            continue
        place = next((i for i, free in enumerate(room) if piece.tokens <= free), len(batches))
        if place == len(batches):
            batches.append([])
            room.append(budget)
        batches[place].append(piece)
        room[place] -= piece.tokens
    return tuple(tuple(batch) for batch in batches)
