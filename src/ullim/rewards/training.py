"""Fitting a small reward model: a sentence encoder whose upper layers and new head learn a yes/no signal.

The embeddings and lower layers stay as they are, so that a forward pass needs gradients only at the top and a few
thousand examples are enough. The result is a folder that `RewardScorer` (and any Hugging Face sequence classifier
loader) reads, with the template it was trained under.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from ullim.errors import BadInput
from ullim.rewards.rendering import RewardTemplate, render
from ullim.signals.examples import LabelledAnswer

Progress = Callable[[str, float], None]
"""Called with what is being done and the share done, 0 to 1."""


_TEMPLATE = RewardTemplate(context_turns=2, max_tokens=96)


@dataclass(frozen=True, slots=True)
class FitSettings:
    """How the model is fitted; the defaults are for about two thousand chat turns on one core."""

    template: RewardTemplate = _TEMPLATE
    trained_layers: int = 2
    epochs: int = 1
    batch_size: int = 16
    learning_rate: float = 4e-4
    weight_decay: float = 0.01
    warmup: float = 0.1  # share of the steps; the rate then falls linearly to 0
    seed: int = 0


_SETTINGS = FitSettings()


def fit_reward_model(
    base: Path,
    examples: Sequence[LabelledAnswer],
    out: Path,
    *,
    settings: FitSettings = _SETTINGS,
    progress: Progress = lambda text, share: None,
) -> dict[str, float]:
    """Fit a classifier on `base` (a BERT-like encoder folder) to `examples` and save it in `out` (made if absent).

    Binary cross-entropy of one logit; the same inputs, seed and thread count give the same weights on one machine.
    Returns `examples`, `skipped` (answers that do not fit), `seconds` and `loss_last` (mean of the last tenth of
    the steps). BadInput where a class is missing or nothing fits.
    """
    start = time.monotonic()
    max_tokens = settings.template.max_tokens or 512
    tokenizer = AutoTokenizer.from_pretrained(base, local_files_only=True)
    inputs = [
        (rendered, float(example.label))
        for example in examples
        if (rendered := render(settings.template, example.messages, example.answer, tokenizer, max_tokens=max_tokens))
    ]
    if len({label for _, label in inputs}) < 2:
        raise BadInput(f"a reward model needs positive and negative answers; {len(inputs)} usable ones are all alike")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = AutoModelForSequenceClassification.from_pretrained(
            base, num_labels=1, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
        losses = _fit(model, tokenizer, inputs, settings, progress)
    model.eval()
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    settings.template.save(out)
    tail = losses[-max(1, len(losses) // 10) :]
    return {
        "examples": float(len(inputs)),
        "skipped": float(len(examples) - len(inputs)),
        "seconds": time.monotonic() - start,
        "loss_last": sum(tail) / len(tail),
    }


_Input = tuple[dict[str, list[int]], float]


def _fit(model: Any, tokenizer: Any, inputs: list[_Input], settings: FitSettings, progress: Progress) -> list[float]:
    """The training loop; returns the loss of each step."""
    parameters = _free_the_top(model, settings.trained_layers)
    optimizer = torch.optim.AdamW(parameters, lr=settings.learning_rate, weight_decay=settings.weight_decay)
    batches = [batch for epoch in range(settings.epochs) for batch in _batches(inputs, settings, epoch)]
    warmup = max(1, int(settings.warmup * len(batches)))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (len(batches) - step) / max(1, len(batches) - warmup))
    )
    losses = []
    for step, batch in enumerate(batches):
        padded = tokenizer.pad([rendered for rendered, _ in batch], padding=True, return_tensors="pt")
        labels = torch.tensor([label for _, label in batch])
        loss = binary_cross_entropy_with_logits(model(**padded).logits[:, 0], labels)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        progress("fitting the reward model", (step + 1) / len(batches))
    return losses


def _free_the_top(model: Any, layers: int) -> list[torch.nn.Parameter]:
    """Freeze everything but the last `layers` encoder layers, the pooler and the head; the frozen part runs without
    dropout, as noise below a frozen layer teaches nothing."""
    encoder = model.base_model
    model.eval().requires_grad_(False)
    trained = [*encoder.encoder.layer[len(encoder.encoder.layer) - layers :], model.classifier]
    if getattr(encoder, "pooler", None) is not None:
        trained.append(encoder.pooler)
    for module in trained:
        module.train().requires_grad_(True)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _batches(inputs: list[_Input], settings: FitSettings, epoch: int) -> Iterator[list[_Input]]:
    """All inputs once, in an order fixed by seed and epoch. Batches are cut from stretches sorted by length, which
    saves most of the padding, and come in random order, so that length does not drift through the epoch."""
    rng = random.Random(settings.seed * 1000 + epoch)
    order = rng.sample(inputs, len(inputs))
    stretch = 16 * settings.batch_size
    batches = []
    for start in range(0, len(order), stretch):
        ordered = sorted(order[start : start + stretch], key=lambda pair: len(pair[0]["input_ids"]))
        batches += [ordered[i : i + settings.batch_size] for i in range(0, len(ordered), settings.batch_size)]
    rng.shuffle(batches)
    yield from batches
