"""The builtins as they really are, made from the installed packages."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from ullim.assets.chitchat import PROMPTS_HELDOUT, PROMPTS_TRAIN, part
from ullim.assets.kept_talking import measure_reward_model
from ullim.assets.references import resolve
from ullim.records import Message
from ullim.rewards.model import RewardScorer
from ullim.signals.chitchat import read_conversations
from ullim.signals.kept_talking import kept_talking_examples
from ullim.signals.prompts import encode_prompts, read_prompts


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """A cache of this module's own: nothing an earlier run left behind is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ULLIM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def test_prompts_are_real_turns_in_two_files_without_a_conversation_in_common() -> None:
    train, heldout = read_prompts(resolve("builtin:chitchat")), read_prompts(resolve("builtin:chitchat-heldout"))
    assert len(train) > 3000
    assert len(heldout) > 500
    conversations = [{prompt.prompt_id.split(":")[0] for prompt in prompts} for prompts in (train, heldout)]
    assert not conversations[0] & conversations[1]
    everything = read_conversations()
    for names, stretch in zip(conversations, (PROMPTS_TRAIN, PROMPTS_HELDOUT), strict=True):
        assert names <= {c.conversation_id for c in part(everything, stretch)}


@pytest.mark.slow
def test_smollm2_is_a_chat_model_with_tied_embeddings_that_ends_its_turn() -> None:
    folder = resolve("builtin:smollm2-135m")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert model.config.tie_word_embeddings
    assert model.get_output_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118  (not a dict)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == end

    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert answer[-1] == end
    assert tokenizer.decode(answer, skip_special_tokens=True) == "The capital of France is Paris."

    prompts = read_prompts(resolve("builtin:chitchat"))
    encoded, left_out = encode_prompts(prompts, tokenizer, max_tokens=192, max_new_tokens=64, context=8192)
    assert left_out == {}
    lengths = sorted(len(ids) for _, _, ids in encoded)
    assert lengths[int(0.99 * len(lengths))] <= 150


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_reward_model_knows_more_than_length_and_place_of_conversations_it_has_not_seen() -> None:
    shares: list[float] = []
    folder = resolve("builtin:chitchat-kept-talking", lambda text, share: shares.append(share))
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    written = json.loads((folder / "metrics.json").read_text())["heldout"]
    assert f"{written['auc']:.3f}" in (folder / "README.md").read_text()

    # Again on conversations that neither the fit nor its own measurement used.
    unseen = part(read_conversations(), (0.6, 1.0))
    report = measure_reward_model(folder, kept_talking_examples(unseen, pairs=200, context_turns=2, seed=1))
    heldout = report["heldout"]
    assert heldout["auc_low"] > 0.6
    for baseline in ("auc_answer_length", "auc_context_length", "auc_position"):
        assert heldout["auc"] > max(heldout[baseline], 1 - heldout[baseline]) + 0.1
    assert report["heldout_without_farewells"]["auc"] > 0.55

    asked = (Message("user", "I just got back from a trip to Japan."),)
    goodbye, question = RewardScorer(folder, key="x", max_tokens=128).score(
        [(asked, "Nice. I have to go now, bye!"), (asked, "Wow, that sounds fun! What did you like most there?")]
    )
    assert goodbye.value is not None
    assert question.value is not None
    assert question.value > goodbye.value + 0.5
