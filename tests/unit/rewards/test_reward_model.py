import asyncio
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertForSequenceClassification

from ullim.errors import BadInput
from ullim.records import Completion, FinishReason, Message, Prompt, Score
from ullim.rewards.model import ModelChannel, RewardScorer
from ullim.rewards.rendering import RewardTemplate


def prompt(text: str) -> Prompt:
    return Prompt(text, 0, (Message("user", text),), np.array([1], np.int32))


def answer(text: str, finish: FinishReason = "stop") -> Completion:
    return Completion(np.array([1], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), finish, text)


def scorer(folder: Path, **options: int) -> RewardScorer:
    return RewardScorer(folder, key="rewards.mine.path", **{"max_tokens": 64, **options})


PAIRS = [
    ((Message("user", " ".join(f"w{i}" for i in range(length))),), " ".join(["yes", "no", "bye"] * (length % 4 + 1)))
    for length in (1, 30, 2, 17, 5, 40, 3)
]


def test_the_score_is_the_raw_logit(reward_folder: Path) -> None:
    [score] = scorer(reward_folder).score([((Message("user", "w1 w2"),), "yes")])
    model = BertForSequenceClassification.from_pretrained(reward_folder).eval().double()
    ids = torch.tensor([[2, 5, 6, 3, 44, 3]])
    with torch.no_grad():
        logit = model(input_ids=ids, token_type_ids=torch.tensor([[0, 0, 0, 0, 1, 1]])).logits[0, 0].item()
    assert score.value == pytest.approx(logit, abs=1e-5)
    assert abs(logit) > 1e-3


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_scores_alone_equal_scores_in_a_batch(reward_folder: Path, batch_size: int) -> None:
    together = scorer(reward_folder, batch_size=batch_size).score(PAIRS)
    alone = [scorer(reward_folder).score([pair])[0] for pair in PAIRS]
    values = [score.value for score in together]
    assert values == pytest.approx([score.value for score in alone], abs=1e-5)
    assert np.std(np.array(values, float)) > 1e-2


def test_an_answer_that_does_not_fit_has_no_score_and_disturbs_no_other(reward_folder: Path) -> None:
    long = ((Message("user", "w1"),), " ".join(["yes"] * 62))
    scores = scorer(reward_folder).score([PAIRS[0], long, PAIRS[1]])
    assert [score.value is None for score in scores] == [False, True, False]
    assert scores[1].reason is not None
    assert "64 tokens" in scores[1].reason


def test_the_template_of_the_checkpoint_bounds_the_input(reward_folder: Path) -> None:
    RewardTemplate(context_turns=1, max_tokens=10).save(reward_folder)
    assert scorer(reward_folder).max_tokens == 10
    assert scorer(reward_folder, max_tokens=7).max_tokens == 7


def test_a_logit_that_is_not_finite_is_no_score(reward_folder: Path) -> None:
    broken = scorer(reward_folder)
    with torch.no_grad():
        broken._model.classifier.bias.fill_(float("nan"))
    [score] = broken.score([PAIRS[0]])
    assert score == Score(None, "the reward model gave nan")


def test_a_head_that_was_never_trained_is_refused(encoder_folder: Path) -> None:
    (encoder_folder / "config.json").write_text(
        (encoder_folder / "config.json").read_text().replace("{", '{"num_labels": 1,', 1)
    )
    with pytest.raises(BadInput, match=r"rewards\.mine\.path: .*classifier.*not a trained reward model"):
        scorer(encoder_folder)


def test_two_labels_are_refused(reward_folder: Path) -> None:
    model = BertForSequenceClassification.from_pretrained(reward_folder, num_labels=2, ignore_mismatched_sizes=True)
    model.save_pretrained(reward_folder)
    with pytest.raises(BadInput, match="has 2 labels"):
        scorer(reward_folder)


def test_pickled_weights_are_refused(reward_folder: Path) -> None:
    (reward_folder / "model.safetensors").rename(reward_folder / "pytorch_model.bin")
    with pytest.raises(BadInput, match="holds no"):
        scorer(reward_folder)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"rewards\.mine\.path: .*nowhere.*no config\.json"):
        scorer(tmp_path / "nowhere")


def test_a_truncated_file_is_named(reward_folder: Path) -> None:
    file = reward_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(BadInput, match="cannot be loaded"):
        scorer(reward_folder)


def test_groups_scored_at_once_share_batches_and_get_their_own_scores(reward_folder: Path) -> None:
    inner = scorer(reward_folder)
    rounds: list[int] = []
    score_all = inner.score

    def counted(pairs: list[object]) -> list[Score]:
        rounds.append(len(pairs))
        return score_all(pairs)  # type: ignore[arg-type]

    inner.score = counted  # type: ignore[method-assign,assignment]
    groups = [(prompt(f"w{i} w{i + 1}"), [answer("yes"), answer("no " * (i + 1))]) for i in range(6)]

    async def together() -> list[list[Score]]:
        channel = ModelChannel("mine", inner, threads=1)
        scores = await asyncio.gather(*(channel.score(*group) for group in groups))
        await channel.close()
        return list(scores)

    scores = asyncio.run(together())
    assert sum(rounds) == 12
    for (asked, answers), given in zip(groups, scores, strict=True):
        expected = score_all([(asked.messages, a.text) for a in answers])
        assert [s.value for s in given] == pytest.approx([s.value for s in expected], abs=1e-5)


def test_aborted_answers_are_left_out(reward_folder: Path) -> None:
    async def scenario() -> list[Score]:
        channel = ModelChannel("mine", scorer(reward_folder))
        scores = await channel.score(prompt("w1"), [answer("ye", "aborted"), answer("yes")])
        assert await channel.score(prompt("w1"), [answer("ye", "aborted")]) == [scores[0]]
        assert await channel.score(prompt("w1"), []) == []
        await channel.close()
        return scores

    cut, whole = asyncio.run(scenario())
    assert (cut.value, cut.reason) == (None, "aborted before its end")
    assert whole.value is not None


def test_the_loop_goes_on_during_a_forward_pass(reward_folder: Path) -> None:
    inner = scorer(reward_folder)
    began, go_on = threading.Event(), threading.Event()

    def slow(pairs: list[object]) -> list[Score]:
        began.set()
        assert go_on.wait(60)
        return [Score(1.0)] * len(pairs)

    inner.score = slow  # type: ignore[method-assign,assignment]

    async def scenario() -> list[Score]:
        channel = ModelChannel("mine", inner)
        scoring = asyncio.create_task(channel.score(prompt("w1"), [answer("yes")]))
        await asyncio.to_thread(began.wait, 60)
        go_on.set()  # could not be reached if the forward pass held the loop
        return await scoring

    assert asyncio.run(scenario()) == [Score(1.0)]


def test_a_failing_forward_pass_reaches_everyone_and_the_channel_goes_on(reward_folder: Path) -> None:
    inner = scorer(reward_folder)
    working = inner.score

    def failing(pairs: object) -> list[Score]:
        raise RuntimeError("out of memory")

    async def scenario() -> list[Score]:
        channel = ModelChannel("mine", inner)
        inner.score = failing  # type: ignore[method-assign]
        outcomes = await asyncio.gather(
            *(channel.score(prompt("w1"), [answer("yes")]) for _ in range(3)), return_exceptions=True
        )
        assert [str(outcome) for outcome in outcomes] == ["out of memory"] * 3
        inner.score = working  # type: ignore[method-assign]
        return await channel.score(prompt("w1"), [answer("yes")])

    assert asyncio.run(scenario())[0].value is not None


def test_a_group_given_up_while_it_queues_is_not_scored_and_shifts_no_other(reward_folder: Path) -> None:
    inner = scorer(reward_folder)
    score_all = inner.score
    began, go_on = threading.Event(), threading.Event()
    rounds: list[int] = []

    def held(pairs: list[object]) -> list[Score]:
        rounds.append(len(pairs))
        began.set()
        assert go_on.wait(60)
        return score_all(pairs)  # type: ignore[arg-type]

    inner.score = held  # type: ignore[method-assign,assignment]

    async def scenario() -> list[Score]:
        channel = ModelChannel("mine", inner)
        first = asyncio.create_task(channel.score(prompt("w1"), [answer("yes")]))
        await asyncio.to_thread(began.wait, 60)
        given_up = asyncio.create_task(channel.score(prompt("w1"), [answer("no"), answer("bye")]))
        kept = asyncio.create_task(channel.score(prompt("w2"), [answer("yes")]))
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.gather(given_up, return_exceptions=True)
        go_on.set()
        await first
        return await kept

    [score] = asyncio.run(scenario())
    assert rounds == [1, 1]
    [expected] = score_all([((Message("user", "w2"),), "yes")])
    assert score.value == pytest.approx(expected.value, abs=1e-5)


def test_a_closed_channel_refuses(reward_folder: Path) -> None:
    async def scenario() -> None:
        channel = ModelChannel("mine", scorer(reward_folder))
        await channel.close()
        await channel.close()
        with pytest.raises(RuntimeError, match="closed"):
            await channel.score(prompt("w1"), [answer("yes")])

    asyncio.run(scenario())
