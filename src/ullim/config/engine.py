"""Generation: which engine, and how tokens are drawn."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from ullim.config.base import Section


class SamplingConfig(Section):
    """How rollouts are sampled. The log-prob of a token must be that of the distribution it was drawn from,
    so whatever cuts that distribution is refused for training."""

    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature; the learner divides its logits by the same number."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest answer in tokens; one that reaches it has finish `length`."""

    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), strict=False)
    """An answer ends when its text holds one of these. End-of-turn tokens of the model always end it."""

    top_p: float = 1.0
    """Must stay 1: see the error for why."""

    top_k: int = 0
    """Must stay 0 (off)."""

    min_p: float = 0.0
    """Must stay 0 (off)."""

    repetition_penalty: float = 1.0
    """Must stay 1 (off)."""

    @field_validator("top_p", "top_k", "min_p", "repetition_penalty")
    @classmethod
    def _distribution_is_whole(cls, value: float, info: object) -> float:
        name = getattr(info, "field_name", "")
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}[name]
        if value != neutral:
            raise ValueError(
                f"training rollouts must be drawn from the whole distribution, or the log-probs of engine and "
                f"learner no longer speak of the same thing; write {name} = {neutral:g} (temperature is free)"
            )
        return value


class TransformersEngineConfig(Section):
    """The embedded engine: Hugging Face transformers with continuous batching. Needs nothing but torch."""

    kind: Literal["transformers"] = "transformers"

    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the engine's weights and cache."""

    max_running: int = Field(default=128, ge=1)
    """Answers generated side by side on one node; more wait."""


class NodesConfig(Section):
    """Inference nodes. Each is one process with one engine and every reward model."""

    count: int = Field(default=1, ge=1)
    """Inference nodes. Going from one machine to many changes this number and nothing else."""

    gpus_per_node: float = Field(default=0, ge=0)
    """GPUs that Ray reserves for each node; 0 runs on the CPU."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads of a node. Left out: the machine's cores divided among the processes that share it in `async`
    mode, all of them in `sync` mode, where only one works at a time."""

    restarts: int = Field(default=3, ge=0)
    """How often one node may die and be started again before the run fails."""

    group_attempts: int = Field(default=3, ge=1)
    """How often one group is tried on some node before its prompt is dropped and counted."""
