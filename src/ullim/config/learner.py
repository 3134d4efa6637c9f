"""Learners: ranks, optimiser, micro-batches."""

from typing import Annotated

from pydantic import Field

from ullim.config.base import Section

DecayRate = Annotated[float, Field(ge=0, lt=1)]


class LearnerConfig(Section):
    """The FSDP2 group that trains the policy."""

    ranks: int = Field(default=1, ge=1)
    """Learner processes; the model is sharded over them."""

    gpus_per_rank: float = Field(default=0, ge=0)
    """GPUs that Ray reserves for each rank; 0 trains on the CPU over gloo."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads of a rank; left out, as for `nodes.threads`."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """AdamW's peak learning rate."""

    warmup_steps: int = Field(default=0, ge=0)
    """Linear warm-up, in version steps."""

    betas: tuple[DecayRate, DecayRate] = Field(default=(0.9, 0.95), strict=False)
    """AdamW's decay rates of the mean and of the square of the gradient."""

    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled weight decay."""

    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm is clipped to this."""

    updates_per_step: int = Field(default=1, ge=1)
    """Optimiser updates in one version step, each on an equal share of its groups. With 1, the log-probs at the
    start of the batch are those of the update itself and cost no extra pass."""

    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Tokens (prompts counted once per group) in one forward/backward on one rank. Bounds activation memory."""

    logprob_chunk_tokens: int = Field(default=512, ge=1)
    """Tokens whose logits exist at once: chunk x vocabulary x 4 bytes."""

    restarts: int = Field(default=1, ge=0)
    """How often the run goes back to its newest checkpoint because a rank died."""

    max_bad_steps: int = Field(default=3, ge=1)
    """Steps in a row with a non-finite loss or gradient before the run stops with the samples written out."""
