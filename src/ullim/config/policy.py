"""Which model is trained."""

from typing import Literal

from pydantic import Field

from ullim.config.base import Section


class PolicyConfig(Section):
    """The model to improve."""

    path: str = Field(min_length=1)
    """A Hugging Face causal LM folder with tokenizer and chat template, or `builtin:NAME` for one that comes
    with the demo packages (`builtin:smollm2-135m`)."""

    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of forward and backward passes; master weights and optimiser state are float32 always."""

    chat_template: str | None = None
    """A Jinja file to use in place of the tokenizer's own chat template."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
