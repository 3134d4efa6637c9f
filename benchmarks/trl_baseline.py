"""TRL's GRPOTrainer on the same job, for comparison: same model, prompts, batch, lengths and objective.

    python benchmarks/trl_baseline.py --model MODEL --prompts prompts.jsonl --steps 4 --threads 2

prints one JSON line. `run_trl` is the same as a function; call it in a process of its own, since it sets torch's
threads and leaves a trained model in memory.

It is set up to be as fast as TRL is with transformers generation on a CPU:
- model and optimiser purely in bf16. Ours keeps fp32 master weights, so TRL does the cheaper work here;
- no reference model (beta 0), and one optimiser step a rollout batch, so that it skips the pass for old log-probs;
- gradient checkpointing, which TRL turns on by default, is off; so are checkpoints, logging and progress bars;
- all completions of a step are generated in one call, and trained on in micro-batches of `micro_batch` sequences.
The objective is that of Ullim's defaults: token-mean loss, clip 0.2/0.28, rewards normalised by channel and group.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]
RewardFunction = Callable[..., list[float | None]]  # TRL's: (prompts, completions, completion_ids, **columns)


def length_reward(target: float, width: float) -> RewardFunction:
    """exp(-((tokens - target) / width)² / 2), Ullim's continuous length reward with equal widths."""
    from math import exp

    def length(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [exp(-(((len(ids) - target) / width) ** 2) / 2) for ids in completion_ids]

    return length


def run_trl(
    model_path: str,
    prompts: Sequence[Messages],
    reward_funcs: Sequence[RewardFunction],
    *,
    groups_per_step: int = 8,
    group_size: int = 8,
    max_new_tokens: int = 64,
    steps: int = 4,
    threads: int = 2,
    learning_rate: float = 1e-6,
    temperature: float = 1.0,
    micro_batch: int = 16,
    dtype: str = "bfloat16",
    continuous_batching: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Train for `steps` steps and measure.

    Step k takes prompts k·groups_per_step onwards, in order, from the start again where they run out; each is a
    conversation that ends with a user's turn. Gives `seconds` (wall time of each step, from the end of the one before:
    generation, rewards, backward pass, optimiser), `completions_per_s` and `tokens_per_s` (over all steps but the
    first, which warms up; over the first where it is the only one), `completion_tokens` (mean by step), `rewards`
    (mean by step, one list a function), and `settings`.
    """
    import torch

    torch.set_num_threads(threads)

    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    batch = groups_per_step * group_size
    if batch % micro_batch:
        raise SystemExit(f"--micro-batch ({micro_batch}) must divide groups x group size ({batch})")
    lengths: list[list[int]] = []
    rewards: list[list[list[float | None]]] = [[] for _ in reward_funcs]
    clock: list[float] = []

    class Ends(TrainerCallback):  # type: ignore[misc]
        """Reads the clock when training begins and when each step has ended."""

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            clock.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.append(time.perf_counter())

    def recorded(place: int, function: RewardFunction) -> RewardFunction:
        def record(completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
            if place == 0:
                lengths.append([len(ids) for ids in completion_ids])
            values = function(completion_ids=completion_ids, **columns)
            rewards[place].append(values)
            return values

        record.__name__ = getattr(function, "__name__", f"reward_{place}")
        return record

    rows = [{"prompt": prompts[place % len(prompts)]} for place in range(steps * groups_per_step)]
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=not torch.cuda.is_available(),
            model_init_kwargs={"dtype": dtype},
            bf16=False,  # autocast; the weights are bf16 already
            gradient_checkpointing=False,
            max_steps=steps,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=batch // micro_batch,
            num_generations=group_size,
            max_completion_length=max_new_tokens,
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            shuffle_dataset=False,
            use_transformers_continuous_batching=continuous_batching,
            beta=0.0,
            num_iterations=1,
            loss_type="dapo",
            epsilon=0.2,
            epsilon_high=0.28,
            multi_objective_aggregation="normalize_then_sum",
            learning_rate=learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=0.9,
            adam_beta2=0.95,
            max_grad_norm=1.0,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        )
        trainer = GRPOTrainer(
            model=model_path,
            reward_funcs=[recorded(place, function) for place, function in enumerate(reward_funcs)],
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(model_path, padding_side="left"),
            callbacks=[Ends()],
        )
        trainer.train()

    seconds = [end - begin for begin, end in pairwise(clock)]
    warm = slice(1, None) if len(seconds) > 1 else slice(None)
    busy = sum(seconds[warm])
    return {
        "seconds": seconds,
        "completions_per_s": batch * len(seconds[warm]) / busy,
        "tokens_per_s": sum(map(sum, lengths[warm])) / busy,
        "completion_tokens": [sum(step) / len(step) for step in lengths],
        "rewards": [[_mean(step) for step in channel] for channel in rewards],
        "settings": {
            "groups_per_step": groups_per_step,
            "group_size": group_size,
            "max_new_tokens": max_new_tokens,
            "micro_batch": micro_batch,
            "threads": threads,
            "dtype": dtype,
            "continuous_batching": continuous_batching,
            "stop_token_ids": trainer.eos_token_ids,  # must be those of the loop that it is compared with
        },
    }


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _read_prompts(path: Path) -> list[Messages]:
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["messages"] for line in file if line.strip()]


def _named(name: str) -> RewardFunction:
    module, _, attribute = name.partition(":")
    function: RewardFunction = getattr(import_module(module), attribute)
    return function


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Hugging Face folder with a chat template")
    parser.add_argument("--prompts", required=True, type=Path, help="JSONL with a list `messages` in every line")
    parser.add_argument("--reward", action="append", default=[], help="module:function in TRL's form; may be repeated")
    parser.add_argument("--length-target", type=float, default=40.0, help="target of the length reward, tokens")
    parser.add_argument("--length-width", type=float, default=20.0, help="width of the length reward, tokens")
    parser.add_argument("--groups", type=int, default=8, help="prompts a step")
    parser.add_argument("--group-size", type=int, default=8, help="answers a prompt")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--micro-batch", type=int, default=16, help="sequences in one forward and backward pass")
    parser.add_argument("--continuous-batching", action="store_true", help="transformers' continuous batching")
    options = parser.parse_args()
    # Before torch is imported, or its pools are made for all cores.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with redirect_stdout(sys.stderr):  # stdout carries the one line and nothing else
        result = run_trl(
            options.model,
            _read_prompts(options.prompts),
            [_named(name) for name in options.reward] or [length_reward(options.length_target, options.length_width)],
            groups_per_step=options.groups,
            group_size=options.group_size,
            max_new_tokens=options.max_new_tokens,
            steps=options.steps,
            threads=options.threads,
            learning_rate=options.learning_rate,
            temperature=options.temperature,
            micro_batch=options.micro_batch,
            continuous_batching=options.continuous_batching,
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
