"""The ranks of a learner: who they are, how they meet, how they agree.

Two process groups over the same ranks. `work` carries FSDP's collectives and everything else that the training thread
does; `publishing` belongs to the thread that streams weights out. Collectives of one group must be issued in the same
order on every rank, and two threads cannot promise that, so they never share one.
"""

import datetime
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh

from ullim.errors import BadInput
from ullim.weights.lines import listen


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank stands. `host` and `port` are where rank 0 listens; one rank alone needs neither."""

    rank: int = 0
    world_size: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    device: str = "cpu"
    deadline_s: float = 300.0  # longest wait for another rank in any collective, and for a running publication

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise BadInput(f"learner rank must lie in [0, {self.world_size}), got {self.rank}")
        if self.world_size > 1 and not 0 < self.port < 65536:
            raise BadInput(f"{self.world_size} learner ranks need the port of rank 0's rendezvous, got {self.port}")


def _meeting_place(place: RankPlace, deadline: datetime.timedelta) -> TCPStore:
    """The store through which ranks find each other. Rank 0 listens on `host` only, not on every interface."""
    if place.rank:
        return TCPStore(place.host, place.port, place.world_size, is_master=False, timeout=deadline)
    listener = listen(place.host, place.port, backlog=socket.SOMAXCONN)
    return TCPStore(
        place.host,
        place.port,
        place.world_size,
        is_master=True,
        timeout=deadline,
        master_listen_fd=listener.detach(),
    )


class Ranks:
    """The process groups of one learner. Every rank constructs it at about the same time; `close` ends them.

    Raises torch's DistNetworkError or a timeout where a rank does not come within the deadline.
    """

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self.device = torch.device(place.device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        deadline = datetime.timedelta(seconds=place.deadline_s)
        self._owns_default_group = not dist.is_initialized()
        if self._owns_default_group:
            if place.world_size == 1:
                store: Store = HashStore()
            else:
                store = _meeting_place(place, deadline)
            backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=place.rank, world_size=place.world_size, timeout=deadline
            )
        elif (dist.get_rank(), dist.get_world_size()) != (place.rank, place.world_size):
            raise BadInput(
                f"this process is already rank {dist.get_rank()} of {dist.get_world_size()} and cannot also be learner "
                f"rank {place.rank} of {place.world_size}; give each learner rank a process of its own"
            )
        everyone = list(range(place.world_size))
        self.work = dist.new_group(everyone, timeout=deadline)
        self.publishing = dist.new_group(everyone, timeout=deadline)
        self.mesh = DeviceMesh.from_group(self.work, self.device.type)

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def is_first(self) -> bool:
        return self.place.rank == 0

    def total(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place, on every rank."""
        dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self.work)
        return values

    def largest(self, values: Tensor) -> Tensor:
        """Maximum over all ranks, in place, on every rank."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.work)
        return values

    def from_first(self, values: Tensor) -> Tensor:
        """Rank 0's values, in place, on every rank."""
        dist.broadcast(values, src=0, group=self.work)
        return values

    def barrier(self) -> None:
        """Return once every rank is here."""
        self.total(torch.zeros(1, device=self.device))

    def close(self) -> None:
        """End the groups. Further collectives raise."""
        for group in (self.publishing, self.work):
            dist.destroy_process_group(group)
        if self._owns_default_group:
            dist.destroy_process_group()
