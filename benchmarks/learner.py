"""The learner's forward and backward against a plain padded loop on the same sequences, and where its time goes.

    python benchmarks/learner.py [--model DIR] [--groups 4] [--members 8] [--prompt 100] [--answer 64] [--profile]

All rows train on the same sequences, in bfloat16, and count the same tokens: prompt and answer of every sequence, as a
plain loop would compute them. *plain* is a Hugging Face model on a padded batch with a log-softmax over all logits,
forward and backward only. *repeated* is a whole learner step (loss, gradient norm, AdamW), every sequence a group
of its own; *shared* is the same step with prompts computed once per group. Answers differ in length, by a fixed seed.
Times are wall clock and processor time of this process; the latter is the fairer number on a machine that others share.
"""

import argparse
import dataclasses
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from ullim.assets.references import resolve
from ullim.config.learner import LearnerConfig
from ullim.config.objective import ObjectiveConfig
from ullim.config.policy import PolicyConfig
from ullim.learner.learner import Learner
from ullim.learner.ranks import RankPlace
from ullim.records import LearnerBatch, Sequence


def make_batch(groups: int, members: int, prompt: int, answer: int, vocabulary: int) -> LearnerBatch:
    """Answers of half to all of `answer` tokens, random ids."""
    draw = np.random.default_rng(0)
    sequences = []
    for group in range(groups):
        prompt_ids = draw.integers(0, vocabulary, prompt).astype(np.int32)
        for _ in range(members):
            length = int(draw.integers(answer // 2, answer + 1))
            ids = draw.integers(0, vocabulary, length).astype(np.int32)
            logprobs = np.full(length, -np.log(vocabulary), np.float32)
            sequences.append(
                Sequence(prompt_ids, ids, logprobs, float(draw.normal()), group, np.zeros(length, np.int32))
            )
    return LearnerBatch(0, tuple(sequences))


def best_of(turns: int, work: Callable[[int], None]) -> tuple[float, float]:
    """Smallest wall and processor seconds of `turns` turns after a first one that is not counted."""
    work(0)
    walls, cpus = [], []
    for turn in range(1, turns + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        work(turn)
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return min(walls), min(cpus)


def plain_loop(folder: Path, batch: LearnerBatch, turns: int) -> tuple[float, float]:
    """Eight sequences at a time, padded to the longest of them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    rows = [torch.from_numpy(np.concatenate([s.prompt_ids, s.token_ids]).astype(np.int64)) for s in batch.sequences]

    def work(turn: int) -> None:
        for start in range(0, len(rows), 8):
            ids = torch.nn.utils.rnn.pad_sequence(rows[start : start + 8], batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(r) for r in rows[start : start + 8]], True)
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            logp = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
            (-(logp * mask[:, 1:]).sum() / batch.tokens).backward()
        model.zero_grad()

    return best_of(turns, work)


def learner_steps(folder: Path, batch: LearnerBatch, turns: int, *, profile: bool) -> tuple[float, float, float]:
    """Wall and processor seconds of a whole step, and the share of tokens that went through the model."""
    with tempfile.TemporaryDirectory() as scratch:
        learner = Learner(
            PolicyConfig(path=str(folder)),
            LearnerConfig(),
            ObjectiveConfig(),
            temperature=1.0,
            max_new_tokens=512,
            place=RankPlace(),
            bad_samples=Path(scratch) / "bad.jsonl",
        )
        share = 0.0

        def work(turn: int) -> None:
            nonlocal share
            report = learner.step(dataclasses.replace(batch, version=learner.version))
            share = report.metrics["learner/input_tokens"] / counted(batch)

        wall, cpu = best_of(turns, work)
        if profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                work(0)
            print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        learner.close()
    return wall, cpu, share


def counted(batch: LearnerBatch) -> int:
    """Prompt and answer tokens of every sequence."""
    return sum(len(s.prompt_ids) + len(s.token_ids) for s in batch.sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2-135m", help="folder, or a builtin name")
    for name, default in (("groups", 4), ("members", 8), ("prompt", 100), ("answer", 64), ("threads", 1), ("turns", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--profile", action="store_true", help="print the operations of one step")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    folder = resolve(options.model)
    vocabulary = int(AutoModelForCausalLM.from_pretrained(folder).config.vocab_size)
    batch = make_batch(options.groups, options.members, options.prompt, options.answer, vocabulary)
    alone = tuple(dataclasses.replace(s, group=place) for place, s in enumerate(batch.sequences))
    tokens = counted(batch)
    print(f"{len(batch.sequences)} sequences, {tokens} tokens, {options.threads} thread(s), best of {options.turns}\n")
    print(f"{'':10} {'wall s':>8} {'cpu s':>8} {'tokens/s':>9} {'per cpu s':>10} {'computed':>9} {'of plain':>9}")
    rows: dict[str, Callable[[], tuple[float, float, float]]] = {
        "plain": lambda: (*plain_loop(folder, batch, options.turns), 1.0),
        "repeated": lambda: learner_steps(folder, LearnerBatch(0, alone), options.turns, profile=False),
        "shared": lambda: learner_steps(folder, batch, options.turns, profile=options.profile),
    }
    plain = 0.0
    for name, measure in rows.items():
        wall, cpu, share = measure()
        plain = plain or cpu
        speed = f"{tokens / wall:9.0f} {tokens / cpu:10.0f}"
        print(f"{name:10} {wall:8.2f} {cpu:8.2f} {speed} {share:9.0%} {plain / cpu:8.2f}x", flush=True)
    print(f"\npeak memory of all three: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB")


if __name__ == "__main__":
    main()
