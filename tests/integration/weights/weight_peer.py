"""What the processes of the weight tests run. A module of its own, so that they import it without pytest."""

import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from ullim.weights.gloo_receiver import WeightReceiver
from ullim.weights.gloo_sender import WeightSender
from ullim.weights.manifest import WeightManifest, build_manifest
from ullim.weights.session import TransferFailed

DEADLINE_S = 3.0
TENSORS = 8
ELEMENTS = 100_000


def example_manifest() -> WeightManifest:
    """Eight tensors of 400 kB, one to a chunk."""
    return build_manifest(
        {f"t{i}": torch.empty(ELEMENTS, device="meta") for i in range(TENSORS)}, dtype=None, buffer_bytes=500_000
    )


def example_tensors(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    for i in range(TENSORS):
        yield f"t{i}", torch.full((ELEMENTS,), float(100 * version + i))


def receive(orders: Connection) -> None:
    """Join every session whose address comes in, take versions until it ends, answer with each and with the end."""
    while True:
        with WeightReceiver(orders.recv(), deadline_s=DEADLINE_S) as receiver:
            try:
                while True:
                    orders.send([float(tensor.unique().item()) for _, tensor in receiver.receive(example_manifest())])
            except TransferFailed as error:
                orders.send(error)


def send_and_die(orders: Connection) -> None:
    """Answer with the addresses, send version 1 whole, and be killed in the middle of version 2."""
    sender = WeightSender(["node-0", "node-1"], deadline_s=DEADLINE_S)
    orders.send(sender.addresses)
    sender.send(example_manifest(), example_tensors(1), version=1)

    def cut_short() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in example_tensors(2):
            if name == "t5":
                os.kill(os.getpid(), signal.SIGKILL)
            yield name, tensor

    sender.send(example_manifest(), cut_short(), version=2)
