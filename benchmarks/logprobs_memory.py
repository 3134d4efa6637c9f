"""Peak memory and time of `token_logprobs` against the plain computation, forward and backward.

    python benchmarks/logprobs_memory.py [--tokens 4096] [--vocabulary 49152] [--width 576] [--chunks 256]

Each variant runs in a process of its own, since the peak (ru_maxrss) of a process never falls. "extra" is the peak over
what was resident with inputs loaded; "bound" is what docs/objective.md promises: two float32 buffers
[chunk × vocabulary], the float32 gradient of the head, and the gradient of the hidden states.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

MIB = 2**20
CHILD_DEADLINE_S = 600
SLACK_BYTES = 64 * MIB  # packing buffers of the matrix library and the allocator; does not grow with the shapes


def measure(tokens: int, vocabulary: int, width: int, chunk: int, threads: int) -> dict[str, float]:
    """One forward and backward in this process; chunk 0 is the plain computation. Bytes and seconds."""
    import torch

    from ullim.objective.logprobs import token_logprobs

    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / width**0.5).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)

    def run(count: int) -> float:
        if chunk:
            logp, entropy = token_logprobs(hidden[:count], weight, targets[:count], temperature=1.0, chunk_tokens=chunk)
        else:
            logits = (hidden[:count] @ weight.T).float()
            log_probs = torch.log_softmax(logits, dim=-1)
            logp = log_probs.gather(-1, targets[:count, None]).squeeze(-1)
            entropy = -(log_probs.exp() * log_probs).sum(dim=-1)
        loss = -(logp.mean() + 0.01 * entropy.mean())
        loss.backward()
        return loss.item()

    run(2)  # loads kernels and thread pools, whose memory is not the computation's
    hidden.grad = weight.grad = None
    before = resident_bytes()
    start = time.perf_counter()
    loss = run(tokens)
    seconds = time.perf_counter() - start
    assert weight.grad is not None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"extra": peak - before, "seconds": seconds, "loss": loss, "grad": weight.grad.double().norm().item()}


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--chunks", type=int, nargs="+", default=[256])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)  # the child: measure this chunk size
    args = parser.parse_args()
    shape = (args.tokens, args.vocabulary, args.width)
    if args.measure is not None:
        print(json.dumps(measure(*shape, args.measure, args.threads)))
        return 0

    logits = args.tokens * args.vocabulary * 4
    print(f"{args.tokens} tokens x {args.vocabulary} vocabulary x {args.width} wide, float32, {args.threads} threads")
    print(f"logits of all tokens in float32: {logits / MIB:,.0f} MiB\n")
    print(f"{'variant':<12}{'extra MiB':>11}{'bound MiB':>11}{'extra/bound':>13}{'of plain':>10}{'us/token':>10}")
    plain: dict[str, float] | None = None
    ok = True
    for chunk in (0, *args.chunks):
        options = [f"--{name}={value}" for name, value in zip(("tokens", "vocabulary", "width"), shape, strict=True)]
        command = [sys.executable, __file__, *options, f"--threads={args.threads}", f"--measure={chunk}"]
        child = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_DEADLINE_S, check=False)
        if child.returncode != 0:
            print(f"chunk {chunk} failed with status {child.returncode}:\n{child.stderr}", file=sys.stderr)
            return 1
        found = json.loads(child.stdout)
        plain = plain or found
        name = f"chunk {chunk}" if chunk else "plain"
        bound = (2 * chunk * args.vocabulary + args.vocabulary * args.width + args.tokens * args.width) * 4
        against = f"{bound / MIB:>11,.0f}{found['extra'] / bound:>13.2f}" if chunk else f"{'-':>11}{'-':>13}"
        print(
            f"{name:<12}{found['extra'] / MIB:>11,.0f}{against}{found['extra'] / plain['extra']:>10.3f}"
            f"{found['seconds'] / args.tokens * 1e6:>10.0f}"
        )
        same = all(abs(found[key] - plain[key]) <= 1e-4 * abs(plain[key]) for key in ("loss", "grad"))
        held = not chunk or found["extra"] <= bound + SLACK_BYTES
        ok = ok and same and held
        if not same:
            print(f"  differs from plain: {found} against {plain}", file=sys.stderr)
    print(f"\nsame loss and gradient, extra within the bound + {SLACK_BYTES // MIB} MiB: {'yes' if ok else 'NO'}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
