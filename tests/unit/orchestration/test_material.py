"""What a run works on is read and checked before any process starts; no Ray here."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from ullim.config.load import check_recipe
from ullim.errors import BadInput
from ullim.orchestration.heldout import HeldoutAnswer, HeldoutResult
from ullim.orchestration.material import Material, read_material

sys.path.insert(0, str(Path(__file__).parents[2] / "e2e"))
from toy import toy_recipe, write_prompts

CONTEXT = 64  # of the toy model; one prompt of it is a letter and <turn>, 2 tokens


def material(root: Path, **sections: dict[str, Any]) -> Material:
    return read_material(check_recipe(toy_recipe(root, **sections), "toy"))


def write(path: Path, *contents: str) -> str:
    lines = [json.dumps({"messages": [{"role": "user", "content": content}]}) for content in contents]
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_prompts_are_encoded_in_order_and_held_out_ones_come_from_the_end(tmp_path: Path) -> None:
    found = material(tmp_path, prompts={"heldout": 5})
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert [name for name, _, _ in found.prompts] == [f"{letter}{n}" for n in range(8) for letter in "abc"][:19]
    assert [prompt.prompt_id for prompt in found.heldout] == ["b6", "c6", "a7", "b7", "c7"]
    assert [prompt.position for prompt in found.heldout] == [0, 1, 2, 3, 4]
    _, messages, ids = found.prompts[1]
    assert messages[0].content == "b"
    assert tokenizer.convert_ids_to_tokens(ids.tolist()) == ["b", "<turn>"]
    assert found.left_out == {}


def test_the_context_is_what_the_longest_prompt_and_answer_need(tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", "a", "abcabc")
    found = material(tmp_path, prompts={"path": prompts}, sampling={"max_new_tokens": 10})
    assert found.context == 7 + 10
    # Held-out prompts count as well: they are answered by the same engine.
    found = material(tmp_path, prompts={"path": prompts, "heldout": 1}, sampling={"max_new_tokens": 10})
    assert found.context == 7 + 10


def test_prompts_too_long_are_left_out_and_counted(tmp_path: Path) -> None:
    prompts = write(tmp_path / "p.jsonl", "a", "abcabc", "b", "a" * 60)
    found = material(tmp_path, prompts={"path": prompts, "max_tokens": 6})
    assert [name for name, _, _ in found.prompts] == ["line-1", "line-3"]
    assert found.left_out == {"longer than prompts.max_tokens (6)": 2}


def test_all_prompts_too_long_for_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"all 24 prompts are longer than prompts\.max_tokens \(1\).* has 2 tokens"):
        material(tmp_path, prompts={"max_tokens": 1})


@pytest.mark.parametrize(("max_new_tokens", "fits"), [(CONTEXT - 2, True), (CONTEXT - 1, False), (10 * CONTEXT, False)])
def test_prompt_and_answer_must_fit_the_context(tmp_path: Path, max_new_tokens: int, fits: bool) -> None:
    if fits:
        assert material(tmp_path, sampling={"max_new_tokens": max_new_tokens}).context == CONTEXT
        return
    with pytest.raises(BadInput, match=rf"longer than the context \({CONTEXT}\) less sampling\.max_new_tokens"):
        material(tmp_path, sampling={"max_new_tokens": max_new_tokens})


@pytest.mark.parametrize(("heldout", "fits"), [(23, True), (24, False), (1000, False)])
def test_held_out_prompts_must_leave_some_to_train_on(tmp_path: Path, heldout: int, fits: bool) -> None:
    if fits:
        assert len(material(tmp_path, prompts={"heldout": heldout}).prompts) == 1
        return
    with pytest.raises(BadInput, match=rf"prompts\.heldout: {heldout} of 24 usable prompts"):
        material(tmp_path, prompts={"heldout": heldout})


def test_a_held_out_file_is_read_beside_the_other(tmp_path: Path) -> None:
    heldout = write(tmp_path / "h.jsonl", "d", "e", "f")
    found = material(tmp_path, prompts={"heldout_path": heldout, "heldout": 2})
    assert len(found.prompts) == 24
    assert [prompt.messages[0].content for prompt in found.heldout] == ["d", "e"]


@pytest.mark.parametrize("key", ["path", "heldout_path"])
def test_a_prompts_file_that_is_not_there(tmp_path: Path, key: str) -> None:
    with pytest.raises(BadInput, match=r"nothere\.jsonl: no such file"):
        material(tmp_path, prompts={key: str(tmp_path / "nothere.jsonl")})


def test_a_folder_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"policy\.path: .*nothere is not a Hugging Face model folder \(no config\.json\)"
    ):
        material(tmp_path, policy={"path": str(tmp_path / "nothere")})


@pytest.mark.parametrize(("file", "text"), [("config.json", "{"), ("config.json", "{}"), ("tokenizer.json", "{")])
def test_a_model_folder_with_a_broken_file(tmp_path: Path, file: str, text: str) -> None:
    folder = Path(toy_recipe(tmp_path)["policy"]["path"])
    (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=r"policy\.path: .* cannot be loaded"):
        read_with(tmp_path, str(folder))


def without_template(root: Path) -> str:
    """The toy's model folder with its chat template taken away."""
    folder = Path(toy_recipe(root)["policy"]["path"])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = None
    for file in folder.glob("*.jinja"):
        file.unlink()
    tokenizer.save_pretrained(folder)
    return str(folder)


def read_with(root: Path, policy: str, **more: str) -> Material:
    data = {
        "policy": {"path": policy, **more},
        "prompts": {"path": str(write_prompts(root / "prompts.jsonl")), "heldout": 0},
        "sampling": {"max_new_tokens": 8},
        "rewards": {"len": {"kind": "length_binary", "limit": 3}},
    }
    return read_material(check_recipe(data, "toy"))


def test_a_model_without_a_chat_template_needs_one_named(tmp_path: Path) -> None:
    folder = without_template(tmp_path)
    with pytest.raises(BadInput, match=r"no chat template; name one with policy\.chat_template = FILE\.jinja"):
        read_with(tmp_path, folder)
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}<turn>{{ m['content'] }}{% endfor %}<turn>", encoding="utf-8")
    found = read_with(tmp_path, folder, chat_template=str(template))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.convert_ids_to_tokens(found.prompts[0][2].tolist()) == ["<turn>", "a", "<turn>"]


def test_a_named_chat_template_goes_before_the_models_own(tmp_path: Path) -> None:
    folder = str(toy_recipe(tmp_path)["policy"]["path"])
    template = tmp_path / "mine.jinja"
    template.write_text("{{ messages[0]['content'] }}", encoding="utf-8")
    assert [len(ids) for _, _, ids in read_with(tmp_path, folder, chat_template=str(template)).prompts] == [1] * 24


def test_a_chat_template_that_cannot_be_read_or_refuses_a_prompt(tmp_path: Path) -> None:
    folder = str(toy_recipe(tmp_path)["policy"]["path"])
    with pytest.raises(BadInput, match=r"policy\.chat_template: .*nothere\.jinja"):
        read_with(tmp_path, folder, chat_template=str(tmp_path / "nothere.jinja"))
    template = tmp_path / "stern.jinja"
    template.write_text("{{ raise_exception('no small talk') }}", encoding="utf-8")
    with pytest.raises(BadInput, match="prompt 'a0': the chat template refuses it: no small talk"):
        read_with(tmp_path, folder, chat_template=str(template))


def test_redaction_reaches_the_held_out_answers(tmp_path: Path) -> None:
    answer = HeldoutAnswer("p", "my name is Kim", "hello Kim", 3, {"taste": 1.0})
    result = HeldoutResult(1, {"taste": 1.0}, 3.0, 0.0, (answer,))
    result.write(tmp_path / "heldout.json", lambda text: text.replace("Kim", "█"))
    assert "Kim" not in (tmp_path / "heldout.json").read_text(encoding="utf-8")
    assert HeldoutResult.read(tmp_path / "heldout.json").answers[0].text == "hello █"
