"""Finding what installed packages carry, and saying how to get one that is absent."""

import importlib.util
from pathlib import Path

from ullim.errors import BadInput


def package_folder(module: str, *, package: str) -> Path:
    """The installed folder of `module`, without importing it. BadInput names the PyPI `package` where it is absent."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise BadInput(f'the package {package} is not installed; run `make demo`, or `pip install "ullim[demo]"`')
    return Path(spec.origin).parent
