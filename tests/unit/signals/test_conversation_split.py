import numpy as np

from ullim.signals.split import hash_fraction


def test_a_key_always_falls_into_the_same_place() -> None:
    # sha256(b"\0a")[:8] = 6add3f6b9b5e9a5b... worked out apart from the code below
    import hashlib

    expected = int(hashlib.sha256(b"\0a").hexdigest()[:16], 16) / 16**16
    assert hash_fraction("a") == expected
    assert hash_fraction("a", salt="x") != expected
    assert 0 <= hash_fraction("\udc80") < 1


def test_keys_spread_evenly() -> None:
    shares, _ = np.histogram([hash_fraction(f"conversation-{i}") for i in range(4000)], bins=10, range=(0, 1))
    assert shares.min() > 330
    assert shares.max() < 470
