"""Embedded engine against plain `model.generate`: tokens per second and wasted work, same prompts, side by side.

    python benchmarks/engine.py --model DIR [--answers 64 128] [--new-tokens 64] [--threads 1]

Per number of answers two workloads: *fixed*, where every answer has exactly `--new-tokens` tokens, and *natural*, where
answers end by themselves and so differ in length. `generate` samples a left-padded batch and computes no log-probs;
the engine delivers one per token. "passes per token" is how many token positions went through the model for each token
that somebody asked for (prompt tokens counted once per answer group, answer tokens once): 1 is no waste at all.
Times are wall clock and processor time of this process; the latter is the fairer number on a machine that others share.
"""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ullim.engines.base import GenerationRequest, Sampling
from ullim.engines.transformers import TransformersEngine

TOPICS = ("a river", "winter bread", "an old radio", "chess", "a lost cat", "the sea", "night trains", "a garden wall")


@dataclass(frozen=True)
class Work:
    """Answer tokens made, token positions computed for them, and those that were wanted."""

    tokens: int
    computed: int
    wanted: int


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    runner: str
    workload: str
    answers: int
    tokens: int
    wall_s: float
    cpu_s: float
    passes_per_token: float

    @property
    def line(self) -> str:
        return (
            f"{self.workload:8} {self.answers:7d}  {self.runner:9} {self.tokens:7d} {self.wall_s:8.2f} "
            f"{self.tokens / self.wall_s:9.1f} {self.tokens / self.cpu_s:9.1f} {self.passes_per_token:8.2f}"
        )


def make_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Chat prompts of about 60 to 150 tokens, lengths mixed."""
    detail = "Say who was there, what the weather was like and why it mattered to them. "
    prompts: list[list[int]] = []
    for index in range(count):
        topic = TOPICS[index % len(TOPICS)]
        text = f"Tell me story number {index} about {topic}. " + detail * (1 + index * 5 % 6)
        messages = [{"role": "user", "content": text}]
        prompts.append(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))
    return prompts


async def run_engine(
    engine: TransformersEngine, prompts: list[list[int]], members: int, new_tokens: int, stop: int
) -> Work:
    """All answers by the embedded engine; `stop` is the token that ends one."""
    before = engine.counters()
    sampling = Sampling(max_new_tokens=new_tokens, stop_token_ids=(stop,), seed=1)
    requests = [
        GenerationRequest(f"p{i}", np.array(p, dtype=np.int32), members, sampling) for i, p in enumerate(prompts)
    ]
    tokens = 0
    async for delta in engine.generate(requests):
        tokens += len(delta.token_ids)
    computed = engine.counters().prompt_tokens - before.prompt_tokens + tokens
    return Work(tokens, computed, tokens + sum(map(len, prompts)))


def run_generate(
    model: Any, prompts: list[list[int]], members: int, new_tokens: int, eos: int, *, natural: bool
) -> Work:
    """The same with `model.generate`: rows left-padded to the longest prompt, all of them until the last one ends."""
    rows = [prompt for prompt in prompts for _ in range(members)]
    longest = max(map(len, rows))
    ids = torch.tensor([[eos] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    options = {"max_new_tokens": new_tokens, "do_sample": True, "top_k": 0, "pad_token_id": eos}
    if not natural:
        options["min_new_tokens"] = new_tokens
    with torch.inference_mode():
        out = model.generate(input_ids=ids, attention_mask=mask, **options)[:, longest:]
    ended = out == eos
    lengths = torch.where(ended.any(1), ended.int().argmax(1) + 1, out.shape[1])
    tokens = int(lengths.sum()) if natural else out.numel()
    return Work(tokens, ids.numel() + out.numel(), tokens + sum(map(len, prompts)))


@contextmanager
def stopwatch(runner: str, workload: str, answers: int, results: list[Result]) -> Iterator[list[Work]]:
    """Time the block; the work that it appends becomes a row of the table."""
    works: list[Work] = []
    wall, cpu = time.perf_counter(), time.process_time()
    yield works
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    work = works[0]
    results.append(Result(runner, workload, answers, work.tokens, wall, cpu, work.computed / work.wanted))
    print(results[-1].line, flush=True)


async def compare(options: argparse.Namespace) -> list[Result]:
    """All measurements, printed as they come."""
    tokenizer = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    eos, unused = int(tokenizer.eos_token_id), len(tokenizer) - 1
    plain = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16, local_files_only=True).eval()
    engine = TransformersEngine(options.model, threads=options.threads, max_running=max(options.answers))
    results: list[Result] = []
    print(f"{'workload':8} answers  {'runner':9}  tokens   wall s     tok/s tok/cpu-s passes/token")
    for answers, workload in itertools.product(options.answers, ("fixed", "natural")):
        prompts = make_prompts(tokenizer, -(-answers // options.members))
        natural = workload == "natural"
        with stopwatch("engine", workload, answers, results) as works:
            stop = eos if natural else unused
            works.append(await run_engine(engine, prompts, options.members, options.new_tokens, stop))
        if options.engine_only:
            continue
        with stopwatch("generate", workload, answers, results) as works:
            works.append(run_generate(plain, prompts, options.members, options.new_tokens, eos, natural=natural))
        ours, theirs = results[-2:]
        ratio = (ours.tokens / ours.cpu_s) / (theirs.tokens / theirs.cpu_s)
        print(f"{'':17} engine / generate: {ratio:.2f} times the tokens per processor second")
    await engine.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face chat model")
    parser.add_argument("--answers", type=int, nargs="+", default=[64, 128], help="answers at once")
    parser.add_argument("--members", type=int, default=8, help="answers per prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--engine-only", action="store_true", help="leave model.generate out")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = asyncio.run(compare(options))
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
        print(f"written: {options.json}")


if __name__ == "__main__":
    main()
