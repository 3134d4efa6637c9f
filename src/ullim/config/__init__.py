"""Recipes: one pydantic model per concept, read from TOML. Imports without torch."""

from ullim.config.load import load_recipe
from ullim.config.run import Recipe

__all__ = ["Recipe", "load_recipe"]
