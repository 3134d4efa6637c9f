"""Models and data that come with installable packages, for the demo and for trying a recipe without a hub.

`builtin:NAME` in a recipe is resolved here to a folder or file, made on first use and kept in a cache.
"""

from ullim.assets.references import BUILTINS, resolve, resolve_recipe

__all__ = ["BUILTINS", "resolve", "resolve_recipe"]
