"""The running rows and their prompts, kept dense in the two stores."""

from collections.abc import Sequence

import numpy as np
import torch

from ullim.engines.kvcache import SlotStore
from ullim.engines.plans import RowLayout
from ullim.engines.sequences import Group, Row


class LiveBatch:
    """Rows 0..B-1 own answer slots 0..B-1, groups 0..G-1 own prompt slots 0..G-1; a leaver's place is refilled."""

    def __init__(self, prompts: SlotStore, answers: SlotStore, device: torch.device) -> None:
        self.prompts = prompts
        self.answers = answers
        self.rows: list[Row] = []
        self.groups: list[Group] = []
        self._device = device
        self._layout: RowLayout | None = None

    def add_groups(self, groups: Sequence[Group]) -> None:
        """Give each group a prompt slot; its keys and values are still to be computed."""
        if not groups:
            return
        live = len(self.groups)
        self.prompts.reserve(live + len(groups), max(len(g.prompt) for g in [*self.groups, *groups]), live)
        for slot, group in enumerate(groups, start=live):
            group.slot = slot
            self.groups.append(group)
        self._layout = None

    def add_rows(self, rows: Sequence[Row]) -> None:
        """Give each row an answer slot, long enough for all it may still say."""
        if not rows:
            return
        live = len(self.rows)
        self.answers.reserve(live + len(rows), max(r.group.limit for r in [*self.rows, *rows]), live)
        self.rows.extend(rows)
        for row in rows:
            row.group.running += 1
        self._layout = None

    def remove(self, leaving: Sequence[Row]) -> None:
        """Take rows out, and the groups of which nothing runs and nothing waits."""
        gone = set(map(id, leaving))
        for slot in range(len(self.rows) - 1, -1, -1):
            row = self.rows[slot]
            if id(row) not in gone:
                continue
            row.group.running -= 1
            last = self.rows.pop()
            if last is not row:
                self.answers.move(len(self.rows), slot, len(last.tokens))
                self.rows[slot] = last
        self._drop_idle_groups()
        self._layout = None

    def make_room(self) -> None:
        """Give every running row and its prompt a place again after the stores were released."""
        if self.groups:
            self.prompts.reserve(len(self.groups), max(len(g.prompt) for g in self.groups), 0)
        if self.rows:
            self.answers.reserve(len(self.rows), max(r.group.limit for r in self.rows), 0)

    def _drop_idle_groups(self) -> None:
        for slot in range(len(self.groups) - 1, -1, -1):
            group = self.groups[slot]
            if group.running or group.unstarted:
                continue
            last = self.groups.pop()
            if last is not group:
                self.prompts.move(len(self.groups), slot, len(last.prompt))
                self.groups[slot], last.slot = last, slot
            group.slot = -1

    def layout(self) -> RowLayout:
        """How rows share prompts; worked out again only after someone joined or left."""
        if self._layout is None:
            self._layout = self._build_layout()
        return self._layout

    def _build_layout(self) -> RowLayout:
        members: list[list[int]] = [[] for _ in self.groups]
        for slot, row in enumerate(self.rows):
            members[row.group.slot].append(slot)
        widest = max(map(len, members))
        gather = np.zeros((len(self.groups), widest), dtype=np.int64)
        place = np.zeros(len(self.rows), dtype=np.int64)
        for group, slots in enumerate(members):
            gather[group, : len(slots)] = slots
            place[slots] = group * widest + np.arange(len(slots))
        lengths = torch.tensor([len(g.prompt) for g in self.groups], device=self._device)
        longest = int(lengths.max())
        mask = None
        if int(lengths.min()) != longest:
            beyond = torch.arange(longest, device=self._device) >= lengths[:, None]
            mask = torch.zeros(len(lengths), 1, 1, longest, dtype=self.prompts.keys[0].dtype, device=self._device)
            mask.masked_fill_(beyond[:, None, None], float("-inf"))
        return RowLayout(
            prompts=len(self.groups),
            prompt_length=longest,
            gather=torch.from_numpy(gather.reshape(-1)).to(self._device),
            place=torch.from_numpy(place).to(self._device),
            prompt_mask=mask,
            identity=np.array_equal(gather.reshape(-1), np.arange(len(self.rows))),
        )
