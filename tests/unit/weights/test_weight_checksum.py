"""The checksum: what it must see."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.weights.checksum import BLOCK_BYTES, checksum


def some_bytes(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


@settings(deadline=None, max_examples=50)
@given(count=st.integers(1, 3 * BLOCK_BYTES), data=st.data())
def test_one_flipped_bit_anywhere_shows(count: int, data: st.DataObject) -> None:
    part = some_bytes(count)
    before = checksum(part)
    part[data.draw(st.integers(0, count - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(part) != before


def test_blocks_in_a_wrong_order_show_and_a_lost_tail_too() -> None:
    part = some_bytes(2 * BLOCK_BYTES + 5)
    first, second, tail = part[:BLOCK_BYTES], part[BLOCK_BYTES : 2 * BLOCK_BYTES], part[2 * BLOCK_BYTES :]
    others = [torch.cat([second, first, tail]), part[:-1], part[:-5], torch.zeros_like(part), torch.zeros(0).byte()]
    assert len({checksum(part), *(checksum(other) for other in others)}) == 6


def test_parts_add_up_in_order() -> None:
    left, right = some_bytes(5000), some_bytes(700)
    assert checksum(right, checksum(left)) != checksum(left, checksum(right))
    assert checksum(right, checksum(left)) != checksum(right)
    assert checksum(torch.zeros(0, dtype=torch.uint8), 123) == 123


def test_it_reads_bytes_not_sums_that_overflow() -> None:
    """512 words of 2**63 - 1 overflow any signed sum; wrapping around keeps them apart from others."""
    full = torch.full((BLOCK_BYTES // 8,), 2**63 - 1).view(torch.uint8)
    almost = torch.full((BLOCK_BYTES // 8,), 2**63 - 2).view(torch.uint8)
    assert checksum(full) != checksum(almost)
