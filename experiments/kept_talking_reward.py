"""How good the built-in reward model is on conversations that it was not fitted to.

Prints the table of docs/rewards.md: AUC with its 95 % interval beside baselines that need no model, on answers from
the conversations that hold the prompts. The model is fitted first where it is not in the cache (about a minute of one
core). Run: `python experiments/kept_talking_reward.py`
"""

from ullim.assets import resolve
from ullim.assets.chitchat import PROMPTS_HELDOUT, PROMPTS_TRAIN, part
from ullim.assets.kept_talking import measure_reward_model
from ullim.signals.chitchat import read_conversations
from ullim.signals.kept_talking import kept_talking_examples

PAIRS = 600
SEED = 1


def main() -> None:
    folder = resolve("builtin:chitchat-kept-talking", lambda text, share: print(f"\r{text} {share:4.0%}", end=""))
    print(f"\n{folder}")
    unseen = part(read_conversations(), (PROMPTS_TRAIN[0], PROMPTS_HELDOUT[1]))
    report = measure_reward_model(folder, kept_talking_examples(unseen, pairs=PAIRS, context_turns=2, seed=SEED))
    for name, measured in report.items():
        print(f"\n{name}")
        for key, value in measured.items():
            print(f"  {key:<20} {value:8.3f}")


if __name__ == "__main__":
    main()
