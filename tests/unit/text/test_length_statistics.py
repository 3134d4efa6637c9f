import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.text.length import count_characters, summarize_lengths

regex = pytest.importorskip("regex")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("hello", 5),
        ("a b\n", 4),
        ("a\r\nb", 3),
        ("안녕하세요", 5),
        (unicodedata.normalize("NFD", "안녕하세요"), 5),  # 12 jamo
        ("e\u0301", 1),
        ("x\u0301\u0323", 1),  # no composed form exists
        ("नमस्ते", 4),
        ("👍🏽", 1),
        ("👨\u200d👩\u200d👧", 1),
        ("🇰🇷🇫🇷", 2),
        ("🇰🇷🇫", 2),
        ("❤\ufe0f!", 2),
        ("\u0301a", 2),  # a mark with nothing before it stands alone
    ],
)
def test_characters_a_reader_counts(text: str, expected: int) -> None:
    assert count_characters(text) == expected


@given(st.text(alphabet=st.characters(codec="utf-8", categories=["L", "N", "P", "Zs"]), max_size=40))
@settings(deadline=None, max_examples=50)
def test_letters_agree_with_unicode_grapheme_clusters(text: str) -> None:
    text = unicodedata.normalize("NFC", "".join(c for c in text if not 0x1100 <= ord(c) <= 0x11FF))
    clusters = regex.findall(r"\X", text)
    # Prepended marks and Thai/Lao vowels are where the full tables say more; everyday letters must agree.
    if all(len(cluster) == 1 or unicodedata.category(cluster[1])[0] == "M" for cluster in clusters):
        assert count_characters(text) == len(clusters)


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=50)
def test_characters_do_not_depend_on_the_normal_form(text: str) -> None:
    count = count_characters(text)
    assert count == count_characters(unicodedata.normalize("NFD", text))
    assert (count == 0) == (text == "")
    assert count <= len(unicodedata.normalize("NFC", text))


def test_summary_is_that_of_the_numbers() -> None:
    summary = summarize_lengths([1, 2, 3, 4, 10])
    assert summary == pytest.approx({"mean": 4.0, "std": 10.0**0.5, "p10": 1.4, "median": 3.0, "p90": 7.6, "max": 10.0})
    assert summarize_lengths(np.array([7])) == {"mean": 7, "std": 0, "p10": 7, "median": 7, "p90": 7, "max": 7}


def test_summary_of_nothing_has_no_numbers() -> None:
    assert summarize_lengths([]) == {}
