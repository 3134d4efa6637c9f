"""What every config model shares: unknown keys are refused, values are frozen, docstrings are the help text."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One section of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
