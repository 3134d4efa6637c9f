"""What every config model shares: unknown keys and other types are refused, values are frozen, docstrings are the
help text."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of a recipe."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,  # `steps = true` is a mistake, not 1 step
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )
