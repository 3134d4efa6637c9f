"""Transfers between real processes that are killed or stopped in the middle of one."""

import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ullim.weights.gloo_receiver import WeightReceiver
from ullim.weights.gloo_sender import WeightSender
from ullim.weights.session import SessionAddress, TransferFailed

START_S = 120.0  # a new process imports torch first, on a machine that may be busy


@dataclass
class Peer:
    process: BaseProcess
    orders: Connection

    def answer(self) -> Any:
        assert self.orders.poll(START_S), "the process says nothing"
        return self.orders.recv()


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # the processes inherit it, and find the module there
    return importlib.import_module("weight_peer")


@pytest.fixture
def start() -> Iterator[Callable[[Callable[[Connection], None]], Peer]]:
    """Starts processes, all forked from one server that has imported torch, and kills them in the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ullim.weights.gloo_receiver", "ullim.weights.gloo_sender"])
    running: list[BaseProcess] = []

    def start_one(work: Callable[[Connection], None]) -> Peer:
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there,), daemon=True)
        process.start()
        there.close()
        running.append(process)
        return Peer(process, here)

    yield start_one
    for process in running:
        process.kill()
        process.join(30)


def values(peers: ModuleType, version: int) -> list[float]:
    return [float(100 * version + i) for i in range(peers.TENSORS)]


def interrupted(
    peers: ModuleType, version: int, victim: BaseProcess, number: signal.Signals
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a version; `victim` gets the signal when half of them are gone."""
    for name, tensor in peers.example_tensors(version):
        if name == "t4":
            assert victim.pid is not None
            os.kill(victim.pid, number)
            if number == signal.SIGKILL:
                victim.join(10)
        yield name, tensor


def test_a_killed_and_a_stopped_node_are_named_and_the_others_go_on(
    peers: ModuleType, start: Callable[[Callable[[Connection], None]], Peer]
) -> None:
    manifest = peers.example_manifest()
    nodes = {name: start(peers.receive) for name in ("node-0", "node-1", "node-2")}

    with WeightSender(list(nodes), deadline_s=START_S) as sender:
        for name, node in nodes.items():
            node.orders.send(sender.addresses[name])
        assert sender.send(manifest, peers.example_tensors(1), version=1).bytes == 8 * 400_000
        assert [node.answer() for node in nodes.values()] == [values(peers, 1)] * 3
        with pytest.raises(TransferFailed, match="version 2 failed: node-1: is gone") as killed:
            sender.send(manifest, interrupted(peers, 2, nodes["node-1"].process, signal.SIGKILL), version=2)
    assert killed.value.peers == ("node-1",)
    rest = {name: node for name, node in nodes.items() if name != "node-1"}
    for node in rest.values():
        verdict = node.answer()
        assert isinstance(verdict, TransferFailed)
        assert verdict.peers == ("node-1",), "the survivors are told whose fault it was"

    with WeightSender(list(rest), deadline_s=peers.DEADLINE_S) as sender:
        for name, node in rest.items():
            node.orders.send(sender.addresses[name])
        for version in (3, 4):
            sender.send(manifest, peers.example_tensors(version), version)
            assert [node.answer() for node in rest.values()] == [values(peers, version)] * 2
        with pytest.raises(TransferFailed, match="version 5 failed: node-2: no chunk got through") as stopped:
            sender.send(manifest, interrupted(peers, 5, nodes["node-2"].process, signal.SIGSTOP), version=5)
    assert stopped.value.peers == ("node-2",)
    assert nodes["node-0"].answer().peers == ("node-2",)


def test_a_sender_that_is_killed_is_named_by_every_receiver(
    peers: ModuleType, start: Callable[[Callable[[Connection], None]], Peer]
) -> None:
    def take(address: SessionAddress) -> tuple[list[float], TransferFailed]:
        with WeightReceiver(address, deadline_s=peers.DEADLINE_S) as receiver:
            whole = [float(tensor[0]) for _, tensor in receiver.receive(peers.example_manifest())]
            with pytest.raises(TransferFailed, match=r"learner at .* is gone") as failed:
                list(receiver.receive(peers.example_manifest()))
            return whole, failed.value

    learner = start(peers.send_and_die)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(take, learner.answer().values()))
    assert [whole for whole, _ in results] == [values(peers, 1)] * 2
    assert [failed.peers for _, failed in results] == [("learner",)] * 2
