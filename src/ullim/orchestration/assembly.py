"""From scored groups to the learner's batch: rewards by channel, advantages by member, sequences."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ullim.config.objective import AdvantageConfig
from ullim.objective.advantages import decoupled_advantages, group_advantages
from ullim.objective.diagnostics import advantage_shares
from ullim.records import Completion, LearnerBatch, RolloutGroup
from ullim.records import Sequence as TokenSequence

Member = tuple[int, int]  # (ticket, place in its group's completions)


@dataclass(frozen=True, slots=True)
class Assembly:
    """A batch and what it was made of. `members[i]` is whose answer `batch.sequences[i]` is."""

    batch: LearnerBatch
    members: tuple[Member, ...]
    advantages: Mapping[Member, float]
    channel_advantages: Mapping[Member, Mapping[str, float]]
    shares: Mapping[str, float]  # `advantage/<channel>/share`: how much each channel moves the advantage
    unscored: Counter[str] = field(default_factory=Counter)  # "channel: reason" -> members

    @property
    def teaches_nothing(self) -> bool:
        """Every advantage is exactly 0: all groups flat, or nothing scored."""
        return all(advantage == 0 for advantage in self.advantages.values())


def assemble(
    groups: Sequence[RolloutGroup], *, version: int, weights: Mapping[str, float], settings: AdvantageConfig
) -> Assembly:
    """Advantages over `groups` and the batch that the learner at `version` takes.

    `weights` by channel name; channels of weight 0 are scored and logged only. A member that lacks the score
    of any weighted channel leaves statistics and loss alike: to fill in a number would be to invent a reward,
    and to use the others alone would compare it on another scale. Aborted members leave too.
    """
    weighted = {name: weight for name, weight in weights.items() if weight > 0}
    unscored: Counter[str] = Counter()
    members: list[Member] = []
    completions: list[Completion] = []
    rows: list[list[float]] = []
    for group in groups:
        for place, completion in enumerate(group.completions):
            if completion.finish == "aborted" or not len(completion.token_ids):
                unscored["aborted"] += 1
                continue
            members.append((group.ticket, place))
            completions.append(completion)
            rows.append(_weighted_scores(completion, weighted, unscored))

    rewards = torch.tensor(rows, dtype=torch.float32).reshape(len(rows), len(weighted))
    group_ids = torch.tensor([ticket for ticket, _ in members], dtype=torch.int64)
    by_channel = {name: rewards[:, column] for column, name in enumerate(weighted)}
    advantages, parts = _advantages(by_channel, group_ids, weighted, settings)

    by_ticket = {group.ticket: group for group in groups}
    scored = [i for i, row in enumerate(rows) if not any(map(math.isnan, row))]
    sequences = tuple(
        TokenSequence(
            prompt_ids=by_ticket[members[i][0]].prompt.token_ids,
            token_ids=completions[i].token_ids,
            rollout_logprobs=completions[i].logprobs,
            advantage=float(advantages[i]),
            group=members[i][0],
            versions=completions[i].versions,
        )
        for i in scored
    )
    return Assembly(
        batch=LearnerBatch(version=version, sequences=sequences),
        members=tuple(members[i] for i in scored),
        advantages={members[i]: float(advantages[i]) for i in scored},
        channel_advantages={members[i]: {name: float(part[i]) for name, part in parts.items()} for i in scored},
        shares=advantage_shares(parts),
        unscored=unscored,
    )


def _weighted_scores(completion: Completion, weighted: Mapping[str, float], unscored: Counter[str]) -> list[float]:
    """One value per weighted channel, all NaN if any is missing; reasons are counted."""
    values = []
    for name in weighted:
        score = completion.scores.get(name)
        if score is None or score.value is None:
            unscored[f"{name}: {score.reason if score else 'not scored'}"] += 1
        else:
            values.append(score.value)
    return values if len(values) == len(weighted) else [math.nan] * len(weighted)


def _advantages(
    by_channel: dict[str, torch.Tensor],
    group_ids: torch.Tensor,
    weighted: dict[str, float],
    settings: AdvantageConfig,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(advantages [N], what each channel put in [N])."""
    if settings.kind == "decoupled":
        return decoupled_advantages(by_channel, group_ids, weighted, batch_normalize=settings.batch_normalize)
    summed = torch.stack([weighted[name] * values for name, values in by_channel.items()]).sum(0)
    # Without a divisor the centred channels add up to the centred sum, so their sizes are its shares.
    parts = {
        name: weighted[name] * group_advantages(values, group_ids, scale="none") for name, values in by_channel.items()
    }
    return group_advantages(summed, group_ids, scale=settings.scale), parts
