"""Lets the tests of every engine import the shared checks of `tests/conformance`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
