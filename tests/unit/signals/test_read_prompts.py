import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from ullim.errors import BadInput
from ullim.records import Message
from ullim.signals.prompts import read_prompts

GOOD = {"messages": [{"role": "user", "content": "Hi"}]}


def jsonl(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def saying(*turns: tuple[Any, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


def test_lines_become_prompts_with_their_ids(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path,
        saying(("system", "Be kind."), ("user", "안녕"), ("assistant", "네"), ("user", " 좋아 "), id="x", topic=3),
        "",
        GOOD,
        saying(("user", "Hi"), id=7),
    )
    prompts = read_prompts(path)
    assert [prompt.prompt_id for prompt in prompts] == ["x", "line-3", "7"]
    assert prompts[0].messages == (
        Message("system", "Be kind."),
        Message("user", "안녕"),
        Message("assistant", "네"),
        Message("user", " 좋아 "),
    )


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n")
    assert len(read_prompts(path)) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "not JSON .*one object a line"),
        ("[" * 100_000, "not JSON"),
        ("[]", "found a list; expected an object"),
        ("null", "found null"),
        ("{}", "has no `messages`"),
        ({"messages": "Hi"}, "`messages` is a text; expected a list"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": ["Hi"]}, "message 1 is a text; expected an object with role and content"),
        (saying(("human", "Hi")), "message 1 has role 'human'; expected one of system, user, assistant"),
        (saying((["user"], "Hi")), "message 1 has role"),
        (saying(("user", ["Hi"])), "message 1 has content of type a list; expected a text"),
        (saying(("user", None)), "content of type null"),
        (saying(("user", "Hi"), ("assistant", " \n")), "message 2 has empty content"),
        (saying(("user", "Hi"), ("assistant", "Yes")), "last message is from assistant; a prompt ends with"),
        (saying(("user", "Hi"), ("system", "x"), ("user", "Hi")), "message 2 is from system; .* only be the first"),
        (saying(("user", "Hi"), id=""), "`id` is a text ''"),
        (saying(("user", "Hi"), id=True), "`id` is true/false"),
        (saying(("user", "Hi"), id=1.5), "`id` is a number 1.5; expected a text or a whole number"),
        (
            '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
            r"message 1 holds half of a surrogate pair \(U\+D83D",
        ),
        (saying(("user", "Hi"), id="first"), "id 'first' was already used in line 1"),
    ],
)
def test_a_bad_line_is_told_by_number_with_what_is_right(tmp_path: Path, row: Any, message: str) -> None:
    path = jsonl(tmp_path, saying(("user", "Hi"), id="first"), row)
    with pytest.raises(BadInput, match=rf"prompts\.jsonl:\n  line 2: .*{message}"):
        read_prompts(path)


def test_bytes_that_are_no_text_are_told_by_number(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(BadInput, match=r"line 2: not UTF-8"):
        read_prompts(path)


def test_every_mistake_is_told_up_to_ten(tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        read_prompts(jsonl(tmp_path, *["{}"] * 12, GOOD))
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0].strip() for line in lines[1:11]] == [f"line {n}" for n in range(1, 11)]
    assert lines[11].strip() == "... and 2 more"


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_told(tmp_path: Path, content: str) -> None:
    with pytest.raises(BadInput, match="holds no prompts"):
        read_prompts(jsonl(tmp_path, content))


def test_an_absent_file_and_an_unknown_kind_are_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"absent\.jsonl: no such file"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(BadInput, match=r"ends in \.jsonl or \.parquet"):
        read_prompts(tmp_path / "prompts.csv")


def test_parquet_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    rows = [
        saying(("user", "Hi"), id="a", other=1.0),
        saying(("user", "Hi"), ("assistant", "x"), ("user", "y"), id=None),
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), path, row_group_size=1)
    assert [(p.prompt_id, len(p.messages)) for p in read_prompts(path)] == [("a", 1), ("row-2", 3)]

    parquet.write_table(arrow.Table.from_pylist([*rows, saying(("user", ""), id="c"), {"id": "d"}]), path)
    with pytest.raises(BadInput, match=r"row 3: message 1 has empty content\n  row 4: has no `messages`"):
        read_prompts(path)


def test_parquet_without_the_column_or_broken_is_told(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    parquet.write_table(arrow.Table.from_pylist([{"text": "x"}]), path)
    with pytest.raises(BadInput, match="has no column `messages`; found text"):
        read_prompts(path)
    path.write_bytes(b"not parquet")
    with pytest.raises(BadInput, match="cannot be read as Parquet"):
        read_prompts(path)
    parquet.write_table(arrow.table({"messages": arrow.array([], arrow.string())}), path)
    with pytest.raises(BadInput, match="holds no prompts"):
        read_prompts(path)
