"""Whole sessions over real gloo, sender and receivers in threads of one process."""

import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from ullim.errors import BadInput
from ullim.weights import gloo_receiver, packed, roster
from ullim.weights.gloo_group import host_store
from ullim.weights.gloo_receiver import WeightReceiver
from ullim.weights.gloo_sender import WeightSender
from ullim.weights.lines import connect
from ullim.weights.manifest import WeightManifest, build_manifest, manifest_of, named_weights
from ullim.weights.session import SessionAddress, TransferFailed

DEADLINE_S = 20.0
MANIFEST = build_manifest({f"t{i}": torch.empty(300) for i in range(6)}, dtype=None, buffer_bytes=1024)  # two are split

Named = Iterable[tuple[str, torch.Tensor]]
Take = Callable[[WeightReceiver], object]


def weights(version: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.arange(300) + 1000.0 * version + i for i in range(6)}


def take_all(receiver: WeightReceiver, manifest: WeightManifest = MANIFEST) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in receiver.receive(manifest)}


class Nodes:
    """Receivers in threads: each joins and then does what its `take` says."""

    def __init__(self, sender: WeightSender, *takes: Take, deadline_s: float = DEADLINE_S) -> None:
        self._pool = ThreadPoolExecutor(len(takes))
        self.results: list[Future[object]] = [
            self._pool.submit(self._run, address, take, deadline_s)
            for address, take in zip(sender.addresses.values(), takes, strict=True)
        ]

    @staticmethod
    def _run(address: SessionAddress, take: Take, deadline_s: float) -> object:
        with WeightReceiver(address, deadline_s=deadline_s) as receiver:
            return take(receiver)

    def error(self, number: int) -> TransferFailed:
        error = self.results[number].exception(timeout=60)
        assert isinstance(error, TransferFailed), error
        return error


def same(left: object, right: dict[str, torch.Tensor]) -> bool:
    assert isinstance(left, dict)
    return list(left) == list(right) and all(left[name].equal(right[name]) for name in right)


@pytest.fixture
def little_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody is dead the search for a culprit takes its full time; these tests have no slow network."""
    monkeypatch.setattr(roster, "GRACE_S", 0.5)
    monkeypatch.setattr(gloo_receiver, "GRACE_S", 0.5)


@pytest.mark.parametrize(("buffers", "checksum"), [(1, True), (2, True), (2, False)])
def test_one_session_carries_many_versions_to_many_receivers(
    buffers: int, checksum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")  # the interface is ours to choose, not the shell's

    def take(receiver: WeightReceiver) -> list[dict[str, torch.Tensor]]:
        return [take_all(receiver) for _ in range(4)]

    with WeightSender(
        ["node-0", "node-1", "node-2"], deadline_s=DEADLINE_S, buffers=buffers, checksum=checksum
    ) as sender:
        nodes = Nodes(sender, take, take, take)
        for version in range(4):
            stats = sender.send(MANIFEST, weights(version).items(), version)
            assert (stats.version, stats.bytes) == (version, 6 * 300 * 4)
            parts = stats.agree_s + stats.gather_s + stats.pack_s + stats.send_s + stats.confirm_s
            assert 0 < parts <= stats.seconds
        for node in nodes.results:
            taken = node.result(60)
            assert isinstance(taken, list)
            assert all(same(taken[version], weights(version)) for version in range(4))
    assert not torch.distributed.is_initialized()


def test_the_manifest_may_change_and_grow_within_a_session() -> None:
    larger = build_manifest({"big": torch.empty(5000)}, dtype=torch.bfloat16, buffer_bytes=4096)
    empty = build_manifest({}, dtype=None, buffer_bytes=64)
    with WeightSender(["node-0"], deadline_s=DEADLINE_S) as sender:
        nodes = Nodes(sender, lambda r: (take_all(r), take_all(r, larger), take_all(r, empty), take_all(r)))
        sender.send(MANIFEST, weights(1).items(), 1)
        sender.send(larger, [("big", torch.arange(5000.0))], 2)
        sender.send(empty, [], 3)
        sender.send(MANIFEST, weights(4).items(), 4)
        taken: Any = nodes.results[0].result(60)
    assert same(taken[0], weights(1))
    assert same(taken[1], {"big": torch.arange(5000.0).bfloat16()})
    assert taken[2] == {}
    assert same(taken[3], weights(4))


def test_tied_weights_travel_once_and_stay_tied() -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 8), nn.Linear(8, 50, bias=False))
        module[2].weight = module[0].weight
        return module.bfloat16() if seed else module

    learner, engine = model(0), model(1)
    manifest = manifest_of(learner, torch.bfloat16, 512)
    assert manifest_of(engine, torch.bfloat16, 512) == manifest

    def load(receiver: WeightReceiver) -> None:
        own = named_weights(engine)
        for name, tensor in receiver.receive(manifest, version=7):
            own[name].data.copy_(tensor)

    with WeightSender(["node-0"], deadline_s=DEADLINE_S) as sender:
        nodes = Nodes(sender, load)
        masters = named_weights(learner)
        stats = sender.send(manifest, ((e.name, masters[e.name]) for e in manifest.entries), 7)
        nodes.results[0].result(60)
    assert stats.bytes == 2 * (50 * 8 + 8 * 8 + 8)
    assert engine[2].weight is engine[0].weight  # type: ignore[index]
    for name, tensor in named_weights(engine).items():
        assert tensor.equal(masters[name].bfloat16())


def test_who_never_joins_is_named() -> None:
    with (
        WeightSender(["node-0", "node-1", "node-2"], deadline_s=0.5) as sender,
        WeightReceiver(sender.addresses["node-1"], deadline_s=DEADLINE_S) as receiver,
    ):
        with pytest.raises(TransferFailed, match="node-0, node-2 did not join within") as failed:
            sender.send(MANIFEST, weights(1).items(), 1)
        with pytest.raises(TransferFailed, match="node-0, node-2 did not join") as told:
            take_all(receiver)
    assert failed.value.peers == told.value.peers == ("node-0", "node-2")


def test_who_joined_but_never_takes_weights_is_named() -> None:
    with (
        WeightSender(["node-0"], deadline_s=0.5) as sender,
        WeightReceiver(sender.addresses["node-0"], deadline_s=DEADLINE_S),
        pytest.raises(TransferFailed, match="node-0: no 'here' within") as failed,
    ):
        sender.send(MANIFEST, weights(1).items(), 1)
    assert failed.value.peers == ("node-0",)


def test_who_dies_while_the_group_forms_is_named_at_once() -> None:
    """Gloo itself would wait minutes for such a member. This one only talks, and hangs up when it should connect."""
    with WeightSender(["node-0", "node-1"], deadline_s=DEADLINE_S) as sender:
        address = sender.addresses["node-0"]
        fake = connect(address.host, address.port, DEADLINE_S)
        fake.say("hello", name="node-0", session=address.session)
        pool = ThreadPoolExecutor(1)
        failure = pool.submit(sender.send, MANIFEST, weights(1).items(), 1)
        with WeightReceiver(sender.addresses["node-1"], deadline_s=DEADLINE_S) as receiver:
            other = ThreadPoolExecutor(1).submit(take_all, receiver)
            group = fake.hear(DEADLINE_S)
            assert group is not None
            assert group["kind"] == "group"
            fake.say("here")
            fake.close()
            for error in (failure.exception(60), other.exception(60)):
                assert isinstance(error, TransferFailed)
                assert error.peers == ("node-0",)
                assert "opening the session failed: node-0: is gone" in str(error)


def test_another_manifest_is_refused_before_the_first_tensor_is_even_gathered() -> None:
    other = build_manifest({f"t{i}": torch.empty(300) for i in range(6)}, dtype=None, buffer_bytes=2048)
    gathered = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for item in weights(1).items():
            gathered.append(item[0])
            yield item

    with WeightSender(["node-0", "node-1"], deadline_s=DEADLINE_S) as sender:
        nodes = Nodes(sender, take_all, lambda receiver: take_all(receiver, other))
        with pytest.raises(TransferFailed, match="another manifest") as failed:
            sender.send(MANIFEST, tensors(), 1)
        assert failed.value.peers == ("node-1",)
        assert nodes.error(0).peers == ("node-1",)
        assert "another manifest" in str(nodes.error(1))
    assert gathered == []


def test_another_version_is_refused() -> None:
    with WeightSender(["node-0"], deadline_s=DEADLINE_S) as sender:
        nodes = Nodes(sender, lambda receiver: list(receiver.receive(MANIFEST, version=8)))
        with pytest.raises(TransferFailed, match="version 7 came where 8 was due") as failed:
            sender.send(MANIFEST, weights(7).items(), 7)
        assert failed.value.peers == ("node-0",)
        assert nodes.error(0).peers == ("learner",)


def test_a_corrupted_tensor_is_named_and_never_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit flips in the second chunk between the wire and the receiver, which carries the rest of t0 and t1."""

    class Flipped:
        def __init__(self, pending: packed.Pending, chunk: torch.Tensor) -> None:
            self._pending, self._chunk = pending, chunk

        def wait(self) -> None:
            self._pending.wait()
            self._chunk[-1] ^= 4

    def corrupting(
        manifest: WeightManifest, receive: packed.StartChunk, buffers: Sequence[torch.Tensor], **how: bool
    ) -> Any:
        started = []

        def receive_badly(chunk: torch.Tensor) -> packed.Pending:
            started.append(chunk)
            return Flipped(receive(chunk), chunk) if len(started) == 2 else receive(chunk)

        return packed.unpack(manifest, receive_badly, buffers, **how)

    monkeypatch.setattr(gloo_receiver, "unpack", corrupting)
    with WeightSender(["node-0"], deadline_s=DEADLINE_S) as sender:
        nodes = Nodes(sender, take_all)
        with pytest.raises(TransferFailed, match=r"node-0: .*checksum of 't0' differs \(1 tensors do\)"):
            sender.send(MANIFEST, weights(1).items(), 1)
        assert "'t0'" in str(nodes.error(0))


def test_a_receiver_that_leaves_in_the_middle_is_named_to_everybody_and_the_next_session_is_clean() -> None:
    def leave(receiver: WeightReceiver) -> str:
        for name, _ in receiver.receive(MANIFEST):
            if name == "t2":
                break
        return "left"

    with WeightSender(["node-0", "node-1", "node-2"], deadline_s=DEADLINE_S) as sender:
        nodes = Nodes(sender, take_all, leave, take_all)
        with pytest.raises(TransferFailed, match=r"node-1: .*before the end") as failed:
            sender.send(MANIFEST, weights(1).items(), 1)
        assert failed.value.peers == ("node-1",)
        assert nodes.error(0).peers == nodes.error(2).peers == ("node-1",)
        with pytest.raises(TransferFailed, match=r"this session is over .*node-1.*open a new one"):
            sender.send(MANIFEST, weights(1).items(), 1)
    with WeightSender(["node-0", "node-2"], deadline_s=DEADLINE_S) as sender:
        nodes = Nodes(sender, take_all, take_all)
        sender.send(MANIFEST, weights(2).items(), 2)
        assert all(same(node.result(60), weights(2)) for node in nodes.results)


@pytest.mark.usefixtures("little_grace")
def test_a_receiver_too_busy_to_take_the_next_chunk_is_named_and_those_behind_it_are_not() -> None:
    released = threading.Event()

    def dawdle(receiver: WeightReceiver) -> None:
        for name, _ in receiver.receive(MANIFEST):
            if name == "t1":
                released.wait(60)

    with WeightSender([f"node-{i}" for i in range(4)], deadline_s=1.0) as sender:
        nodes = Nodes(sender, take_all, dawdle, take_all, take_all)
        with pytest.raises(TransferFailed, match="node-1: no chunk got through") as failed:
            sender.send(MANIFEST, weights(1).items(), 1)
        released.set()
        assert failed.value.peers == ("node-1",)
        assert all(nodes.error(i).peers == ("node-1",) for i in (0, 2, 3))


def test_an_error_of_the_caller_s_tensors_comes_out_as_it_was_and_the_receivers_hear_of_it() -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(weights(1).items())[:4]
        raise ZeroDivisionError("gathering t4 went wrong")

    with WeightSender(["node-0"], deadline_s=DEADLINE_S) as sender:
        nodes = Nodes(sender, take_all)
        with pytest.raises(ZeroDivisionError):
            sender.send(MANIFEST, tensors(), 1)
        assert "gathering t4 went wrong" in str(nodes.error(0))


@pytest.mark.usefixtures("little_grace")
def test_a_sender_that_falls_silent_or_is_not_there_is_named() -> None:
    with WeightSender(["node-0"], deadline_s=DEADLINE_S) as sender:
        nodes = Nodes(sender, take_all, deadline_s=0.2)
        error = nodes.error(0)
    assert error.peers == ("learner",)
    assert "no 'group' from learner at 127.0.0.1" in str(error)
    with pytest.raises(TransferFailed, match="cannot reach learner at"):
        WeightReceiver(sender.addresses["node-0"], deadline_s=1.0)


def test_closing_the_session_tells_a_receiver_that_waits() -> None:
    with WeightSender(["node-0"], deadline_s=DEADLINE_S) as sender:
        nodes = Nodes(sender, lambda receiver: (take_all(receiver), take_all(receiver)))
        sender.send(MANIFEST, weights(1).items(), 1)
    assert "closed the session" in str(nodes.error(0))


def test_strangers_at_the_door_change_nothing() -> None:
    with WeightSender(["node-0"], deadline_s=DEADLINE_S) as sender:
        address = sender.addresses["node-0"]
        mute = socket.create_connection((address.host, address.port))
        rude = socket.create_connection((address.host, address.port))
        rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        strays = [
            SessionAddress(address.host, address.port, "0" * 16, "learner", "node-0", 1),
            SessionAddress(address.host, address.port, address.session, "learner", "node-9", 1),
        ]
        refused = [WeightReceiver(stray, deadline_s=DEADLINE_S) for stray in strays]
        nodes = Nodes(sender, take_all)
        sender.send(MANIFEST, weights(1).items(), 1)
        assert same(nodes.results[0].result(60), weights(1))
        for stray in refused:
            with stray, pytest.raises(TransferFailed, match="not expected in this session"):
                list(stray.receive(MANIFEST))
        mute.close()
        rude.close()


def test_it_listens_on_the_given_address_and_no_other() -> None:
    """All of 127.0.0.0/8 reaches this machine, so a second address there shows what a bind to every interface would."""
    with WeightSender(["node-0"], deadline_s=DEADLINE_S) as sender:
        store = host_store("127.0.0.1", DEADLINE_S)
        for port in (sender.addresses["node-0"].port, store.port):
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.2", port), timeout=5)


@pytest.mark.parametrize(
    ("receivers", "host", "said"),
    [
        ([], "127.0.0.1", "distinct receiver names"),
        (["a", "a"], "127.0.0.1", "distinct receiver names"),
        (["learner"], "127.0.0.1", "distinct receiver names"),
        (["a"], "0.0.0.0", "one address of this machine"),
        (["a"], "192.0.2.1", "cannot listen on bind '192.0.2.1'"),
    ],
)
def test_a_session_that_cannot_be_is_refused_at_once(receivers: list[str], host: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        WeightSender(receivers, deadline_s=1.0, host=host)
