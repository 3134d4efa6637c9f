"""A reward model small enough to make in a test: a two-layer BERT with random weights over a few dozen words."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(40)), "yes", "no", "bye"]


def make_tokenizer() -> Any:
    """One id per word; a pair is [CLS] a [SEP] b [SEP] as in BERT."""
    inner = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )


def make_model(seed: int = 0, labels: int = 1) -> BertForSequenceClassification:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertForSequenceClassification(
            BertConfig(
                vocab_size=len(WORDS),
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
                max_position_embeddings=64,
                pad_token_id=0,
                num_labels=labels,
                initializer_range=0.5,  # large enough for scores to differ by more than rounding
            )
        ).eval()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def reward_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "reward"
    make_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def encoder_folder(tmp_path: Path) -> Path:
    """The same encoder without a head, as a sentence encoder comes."""
    folder = tmp_path / "encoder"
    make_model().bert.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
