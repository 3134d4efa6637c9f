from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ullim.errors import BadInput
from ullim.records import Message
from ullim.rewards.evaluation import area_under_roc
from ullim.rewards.model import RewardScorer
from ullim.rewards.rendering import RewardTemplate
from ullim.rewards.training import FitSettings, fit_reward_model
from ullim.signals.examples import LabelledAnswer

SETTINGS = FitSettings(
    template=RewardTemplate(context_turns=1, max_tokens=24), trained_layers=1, epochs=3, learning_rate=2e-2
)


def examples(count: int = 160, offset: int = 0) -> list[LabelledAnswer]:
    """An answer of yes means that the partner stayed, one of bye that they left; the context says nothing."""
    return [
        LabelledAnswer(
            f"c{i}", (Message("user", f"w{i % 40} w{i * 7 % 40}"),), "yes" if i % 2 else "bye", bool(i % 2), 1
        )
        for i in range(offset, offset + count)
    ]


def test_it_learns_what_the_labels_say(encoder_folder: Path, tmp_path: Path) -> None:
    report = fit_reward_model(encoder_folder, examples(), tmp_path / "out", settings=SETTINGS)
    heldout = examples(60, offset=1001)
    scores = RewardScorer(tmp_path / "out", key="x", max_tokens=64).score([(e.messages, e.answer) for e in heldout])
    assert area_under_roc([s.value or 0.0 for s in scores], [e.label for e in heldout]) > 0.95
    assert report["loss_last"] < 0.4
    assert (report["examples"], report["skipped"]) == (160, 0)


def test_the_folder_carries_the_template_it_was_trained_under(encoder_folder: Path, tmp_path: Path) -> None:
    fit_reward_model(encoder_folder, examples(16), tmp_path / "out", settings=SETTINGS)
    assert RewardScorer(tmp_path / "out", key="x", max_tokens=64).template == SETTINGS.template


def test_only_the_top_moves(encoder_folder: Path, tmp_path: Path) -> None:
    fit_reward_model(encoder_folder, examples(32), tmp_path / "out", settings=SETTINGS)
    before = load_file(encoder_folder / "model.safetensors")
    after = load_file(tmp_path / "out" / "model.safetensors")
    moved = {name for name, tensor in before.items() if not torch.equal(tensor, after[f"bert.{name}"])}
    assert {name.split(".weight")[0].split(".bias")[0] for name in moved} >= {"pooler.dense"}
    assert all(name.startswith(("encoder.layer.1.", "pooler.")) for name in moved)


def test_the_seed_decides_everything(encoder_folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    first = fit_reward_model(encoder_folder, examples(32), tmp_path / "a", settings=SETTINGS)
    state = torch.get_rng_state()
    torch.manual_seed(2)
    second = fit_reward_model(encoder_folder, examples(32), tmp_path / "b", settings=SETTINGS)
    assert first["loss_last"] == second["loss_last"]
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    assert all(torch.equal(a[name], b[name]) for name in a)
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers were disturbed"


def test_progress_is_told_to_the_end(encoder_folder: Path, tmp_path: Path) -> None:
    shares: list[float] = []
    fit_reward_model(
        encoder_folder,
        examples(32),
        tmp_path / "out",
        settings=SETTINGS,
        progress=lambda text, share: shares.append(share),
    )
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert len(shares) == 3 * 2  # epochs x batches


def test_answers_that_do_not_fit_are_counted(encoder_folder: Path, tmp_path: Path) -> None:
    long = LabelledAnswer("long", (Message("user", "w1"),), " ".join(["yes"] * 30), True, 1)
    report = fit_reward_model(encoder_folder, [*examples(16), long], tmp_path / "out", settings=SETTINGS)
    assert (report["examples"], report["skipped"]) == (16, 1)


def test_one_class_alone_is_refused(encoder_folder: Path, tmp_path: Path) -> None:
    alike = [e for e in examples(16) if e.label]
    with pytest.raises(BadInput, match="8 usable ones are all alike"):
        fit_reward_model(encoder_folder, alike, tmp_path / "out", settings=SETTINGS)
    with pytest.raises(BadInput, match="0 usable"):
        fit_reward_model(encoder_folder, [], tmp_path / "out", settings=SETTINGS)
