"""Which part of the data a conversation belongs to, decided by its id alone.

The same id falls into the same part in every run, on every machine, and whatever else is in the file, so that a
reward model and the prompts it is later used on never share a conversation by accident.
"""

import hashlib


def hash_fraction(key: str, *, salt: str = "") -> float:
    """A number in [0, 1), uniform over keys and fixed for each (first 8 bytes of SHA-256 of salt and key)."""
    digest = hashlib.sha256(f"{salt}\0{key}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
