"""How fast weights travel: the packed stream against per-parameter broadcasts and against the raw bytes, in one run.

    python benchmarks/weights.py [--layers 30] [--receivers 1] [--rounds 3]

The weights are fp32 masters of SmolLM2-135M's shapes (269 MB in bf16). Every way sends the same values over gloo on
the loopback interface to real processes:

    raw              one broadcast of as many bytes, already cast: what the network gives, the limit
    per parameter    cast, broadcast, wait, for one tensor after another
    packed A x B     ours, with A buffers of B MiB: cast and pack, broadcast, check every tensor at both ends, confirm

Rounds go through all ways in turn, so that a busy moment of the machine hits each of them; the median counts. Printed:
seconds, GB/s, share of raw speed, and for the packed ways where the sender's time went.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from ullim.weights.gloo_group import GlooGroup, host_store, join_store
from ullim.weights.gloo_receiver import WeightReceiver
from ullim.weights.gloo_sender import WeightSender
from ullim.weights.manifest import WeightManifest, build_manifest
from ullim.weights.session import TransferFailed, TransferStats

HOST = "127.0.0.1"
DEADLINE_S = 60.0
WARM_UPS = 1  # the first pass touches buffers for the first time
PACKED = [(2, 4), (1, 16), (2, 16), (1, 64), (2, 64), (2, 256)]  # buffers, MiB
UNCHECKED = (2, 16)


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """SmolLM2-135M: hidden 576, 9 heads of 64 with 3 for keys and values, MLP 1536, vocabulary 49152, tied head."""
    yield "embed", (49152, 576)
    for layer in range(layers):
        for name, shape in (
            ("q", (576, 576)), ("k", (192, 576)), ("v", (192, 576)), ("o", (576, 576)),
            ("gate", (1536, 576)), ("up", (1536, 576)), ("down", (576, 1536)), ("norm1", (576,)), ("norm2", (576,)),
        ):  # fmt: skip
            yield f"{layer}.{name}", shape
    yield "norm", (576,)


class NoControl:
    """For broadcasts without a session: nobody watches."""

    def look(self) -> None: ...

    def blame(self, trouble: str) -> TransferFailed:
        return TransferFailed(f"benchmark: {trouble}")


@dataclass
class Way:
    """One way of sending and what it took, seconds."""

    name: str
    seconds: list[float] = field(default_factory=list)
    stats: list[TransferStats] = field(default_factory=list)


def sized(layers: int, buffer_mib: int) -> WeightManifest:
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes(layers)}
    return build_manifest(tensors, dtype=torch.bfloat16, buffer_bytes=buffer_mib * 2**20)


def receive(orders: Connection, layers: int, passes: int) -> None:
    """A receiver's process: one group for the plain ways, one session after another for the packed ones."""
    torch.set_num_threads(1)
    port, rank, size = orders.recv()
    group = GlooGroup(join_store(HOST, port, DEADLINE_S), rank, size, HOST, DEADLINE_S, NoControl())
    whole = torch.empty(sized(layers, 64).nbytes, dtype=torch.uint8)
    single = [torch.empty(shape, dtype=torch.bfloat16).view(-1).view(torch.uint8) for _, shape in shapes(layers)]
    sessions = [WeightReceiver(address, deadline_s=DEADLINE_S, buffers=count) for count, address in orders.recv()]
    sizes = [*(mib for _, mib in PACKED), UNCHECKED[1]]
    for _ in range(passes):
        group.start(whole, NoControl()).wait()
        for tensor in single:
            group.start(tensor, NoControl()).wait()
        for session, mib in zip(sessions, sizes, strict=True):
            for _name, _tensor in session.receive(sized(layers, mib)):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30, help="7 MB each, beside 57 MB of embedding")
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)

    context = multiprocessing.get_context("spawn")
    names = [f"node-{i}" for i in range(options.receivers)]
    pipes, passes = [], WARM_UPS + options.rounds
    for _ in names:
        here, there = context.Pipe()
        context.Process(target=receive, args=(there, options.layers, passes), daemon=True).start()
        pipes.append(here)
    masters = {name: torch.randn(shape) for name, shape in shapes(options.layers)}
    raw = torch.cat([tensor.bfloat16().view(-1) for tensor in masters.values()]).view(torch.uint8)

    store = host_store(HOST, DEADLINE_S)
    senders = [WeightSender(names, deadline_s=DEADLINE_S, buffers=count) for count, _ in PACKED]
    senders.append(WeightSender(names, deadline_s=DEADLINE_S, buffers=UNCHECKED[0], checksum=False))
    counts = [*(count for count, _ in PACKED), UNCHECKED[0]]
    manifests = [sized(options.layers, mib) for _, mib in [*PACKED, UNCHECKED]]
    for rank, (name, pipe) in enumerate(zip(names, pipes, strict=True), start=1):
        pipe.send((store.port, rank, 1 + len(names)))
        pipe.send([(count, sender.addresses[name]) for count, sender in zip(counts, senders, strict=True)])
    group = GlooGroup(store, 0, 1 + len(names), HOST, DEADLINE_S, NoControl())

    plain = [Way("raw"), Way("per parameter")]
    packed = [Way(f"packed {count} x {mib} MiB") for count, mib in PACKED]
    packed.append(Way("packed {} x {} MiB, no checksum".format(*UNCHECKED)))
    for version in range(passes):
        started = time.perf_counter()
        group.start(raw, NoControl()).wait()
        plain[0].seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
        for tensor in masters.values():
            group.start(tensor.bfloat16().view(-1).view(torch.uint8), NoControl()).wait()
        plain[1].seconds.append(time.perf_counter() - started)
        for way, sender, manifest in zip(packed, senders, manifests, strict=True):
            started = time.perf_counter()
            way.stats.append(sender.send(manifest, masters.items(), version))
            way.seconds.append(time.perf_counter() - started)
    report(plain + packed, raw.numel(), options)


def report(ways: list[Way], nbytes: int, options: argparse.Namespace) -> None:
    took = {way.name: statistics.median(way.seconds[WARM_UPS:]) for way in ways}
    print(f"{nbytes / 1e6:.0f} MB in bf16, {options.receivers} receiver(s), median of {options.rounds} rounds")
    print(f"{'way':32} {'s':>7} {'GB/s':>6} {'of raw':>7}   sender's s: agree / pack / send / confirm")
    for way in ways:
        seconds = took[way.name]
        split = ""
        if way.stats:
            kept = way.stats[WARM_UPS:]
            parts = [
                statistics.median(getattr(s, f"{part}_s") for s in kept)
                for part in ("agree", "pack", "send", "confirm")
            ]
            split = " / ".join(f"{part:.3f}" for part in parts)
        print(f"{way.name:32} {seconds:7.3f} {nbytes / 1e9 / seconds:6.2f} {took['raw'] / seconds:7.0%}   {split}")
    best = min((way.name for way in ways if way.stats and "no checksum" not in way.name), key=lambda name: took[name])
    print(
        f"best: {best}: {took['raw'] / took[best]:.0%} of raw (target: at least 60 %), "
        f"{took['per parameter'] / took[best]:.2f}x per-parameter broadcast"
    )


if __name__ == "__main__":
    main()
