"""The loop against itself in turn, and against TRL's GRPOTrainer, on the same job in one run.

    python benchmarks/loop.py [--steps 6] [--learner-threads 1] [--without trl sync]

Same model, prompts, 8 x 8 answers a step, at most 64 tokens, one length reward, all cores. Each contestant is a process
of its own, one after the other, so they never compete. Prints completions/s (steady steps: the first two are left out),
busy shares, step time over the largest stage time, and the ratios. A shared machine is noisy: quote the ratios.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

GROUPS, GROUP_SIZE, TOKENS = 8, 8, 64
WARM_UP_STEPS = 2
WITHIN_LARGEST_STAGE = 1.10
OVER_TRL = 1.5


@dataclass(frozen=True)
class Measured:
    """One contestant's steady state. Seconds a step; shares in [0, 1] where they are known."""

    name: str
    step_s: float
    largest_stage_s: float | None = None
    learner_busy: float | None = None
    node_busy: float | None = None
    tokens: float | None = None

    @property
    def completions_per_s(self) -> float:
        return GROUPS * GROUP_SIZE / self.step_s


def run_ours(mode: str, model: Path, prompts: Path, arguments: argparse.Namespace, folder: Path) -> Measured:
    """`ullim train` on a recipe that says nothing but the job."""
    recipe = folder / f"{mode}.toml"
    recipe.write_text(
        f"""
        [run]
        dir = "{folder / mode}"
        [policy]
        path = "{model}"
        [prompts]
        path = "{prompts}"
        heldout = 0
        [sampling]
        max_new_tokens = {TOKENS}
        [rewards.length]
        kind = "length"
        target = 40
        width_short = 20
        width_long = 20
        [loop]
        mode = "{mode}"
        steps = {arguments.steps + WARM_UP_STEPS}
        groups_per_step = {GROUPS}
        group_size = {GROUP_SIZE}
        max_staleness = {arguments.max_staleness if mode == "async" else 0}
        [learner]
        micro_batch_tokens = 2048
        [checkpoint]
        every = 1000
        """,
        encoding="utf-8",
    )
    command = [sys.executable, "-c", "from ullim.cli.main import main; main()", "train", str(recipe)]
    if mode == "async":
        command += [f"--learner.threads={arguments.learner_threads}", f"--nodes.threads={arguments.node_threads}"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    rows = [json.loads(line) for line in (folder / mode / "metrics.jsonl").read_text().splitlines()][WARM_UP_STEPS:]
    return Measured(
        name=mode if mode == "sync" else f"async, η={arguments.max_staleness}",
        step_s=fmean(row["timing/step"] for row in rows),
        largest_stage_s=max(fmean(busy(row, "learner") for row in rows), fmean(busy(row, "node") for row in rows)),
        learner_busy=fmean(row["utilisation/learner"] for row in rows),
        node_busy=fmean(fmean(row["utilisation/node"].values()) for row in rows),
        tokens=fmean(row["length/mean"] for row in rows),
    )


def busy(row: Mapping[str, Any], who: str) -> float:
    """Seconds of work in one step: of the learner, or of the busiest node."""
    share = row[f"utilisation/{who}"]
    return float(row["timing/step"] * (max(share.values()) if isinstance(share, dict) else share))


def run_trl(model: Path, prompts: Path, arguments: argparse.Namespace) -> Measured:
    """TRL at the micro-batch asked for; see trl_baseline.py for how it is set up to be fast."""
    script = Path(__file__).with_name("trl_baseline.py")
    command = [sys.executable, str(script), "--model", str(model), "--prompts", str(prompts)]
    command += ["--groups", str(GROUPS), "--group-size", str(GROUP_SIZE), "--max-new-tokens", str(TOKENS)]
    command += ["--steps", str(arguments.trl_steps + 1), "--micro-batch", str(arguments.trl_micro_batch)]
    command += ["--threads", str(os.cpu_count())]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    line = json.loads(result.stdout.strip().splitlines()[-1])
    return Measured("TRL GRPOTrainer", step_s=fmean(line["seconds"][1:]), tokens=fmean(line["completion_tokens"][1:]))


def table(measured: Sequence[Measured]) -> str:
    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.0%}"

    lines = ["| | s/step | completions/s | step / largest stage | learner busy | node busy | mean tokens |"]
    lines.append("|---|---|---|---|---|---|---|")
    for m in measured:
        stage = "-" if m.largest_stage_s is None else f"{m.step_s / m.largest_stage_s:.2f}"
        tokens = "-" if m.tokens is None else f"{m.tokens:.0f}"
        lines.append(
            f"| {m.name} | {m.step_s:.1f} | {m.completions_per_s:.2f} | {stage} | {share(m.learner_busy)} "
            f"| {share(m.node_busy)} | {tokens} |"
        )
    return "\n".join(lines)


def verdicts(by_kind: Mapping[str, Measured]) -> list[str]:
    """Each target with its number, met or not."""
    told = []
    ours = by_kind["async"]
    if ours.largest_stage_s is not None:
        ratio = ours.step_s / ours.largest_stage_s
        met = ok(ratio <= WITHIN_LARGEST_STAGE)
        told.append(f"step over largest stage {ratio:.2f}x (target at most {WITHIN_LARGEST_STAGE}): {met}")
    if "sync" in by_kind:
        told.append(f"async over sync: {by_kind['sync'].step_s / ours.step_s:.2f}x completions/s")
    if "trl" in by_kind:
        ratio = by_kind["trl"].step_s / ours.step_s
        told.append(f"async over TRL: {ratio:.2f}x completions/s (target at least {OVER_TRL}): {ok(ratio >= OVER_TRL)}")
    return told


def ok(met: bool) -> str:
    return "met" if met else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steady steps of ours")
    parser.add_argument("--trl-steps", type=int, default=2, help="steps of TRL after its first")
    parser.add_argument("--trl-micro-batch", type=int, default=16)
    parser.add_argument("--max-staleness", type=int, default=1)
    parser.add_argument("--learner-threads", type=int, default=1)
    parser.add_argument("--node-threads", type=int, default=1)
    parser.add_argument("--without", nargs="*", default=[], choices=["sync", "trl"])
    arguments = parser.parse_args()
    from ullim.assets import resolve

    model, prompts = resolve("builtin:smollm2-135m"), resolve("builtin:chitchat")
    by_kind: dict[str, Measured] = {}
    with tempfile.TemporaryDirectory() as folder:
        by_kind["async"] = run_ours("async", model, prompts, arguments, Path(folder))
        if "sync" not in arguments.without:
            by_kind["sync"] = run_ours("sync", model, prompts, arguments, Path(folder))
    if "trl" not in arguments.without:
        by_kind["trl"] = run_trl(model, prompts, arguments)
    print(table(list(by_kind.values())))
    print("\n" + "\n".join(verdicts(by_kind)))


if __name__ == "__main__":
    main()
