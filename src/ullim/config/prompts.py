"""Where prompts come from."""

from pydantic import Field

from ullim.config.base import Section


class PromptsConfig(Section):
    """The conversations to be answered: JSONL or Parquet with a column `messages` (role, content) and
    optionally `id`."""

    path: str = Field(min_length=1)
    """A .jsonl or .parquet file, or `builtin:chitchat` for turns of real human conversations."""

    heldout_path: str | None = None
    """Prompts never trained on, for the figures before and after. Without it `heldout` prompts are taken
    from the end of `path`."""

    heldout: int = Field(default=64, ge=0)
    """How many held-out prompts to answer before and after training, at most; 0 leaves the comparison out."""

    heldout_answers: int = Field(default=2, ge=1)
    """Answers drawn per held-out prompt, with the same seeds before and after."""

    max_tokens: int = Field(default=1024, gt=0)
    """Prompts longer than this many tokens, chat template applied, are left out and counted. A cut prompt
    would be another conversation, so nothing is truncated."""

    shuffle: bool = True
    """New order every epoch, from `run.seed`."""

    epochs: int | None = Field(default=None, ge=1)
    """Stop after this many passes over the file; left out, it is repeated until `loop.steps` are done."""
