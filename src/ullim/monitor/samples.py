"""From the loop's nouns to sample rows: one row a completion."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from ullim.records import FinishReason, FloatArray, IntArray, Message, RolloutGroup, Score

Member = tuple[int, int]  # (ticket of the group, place of the completion in `group.completions`)


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One completion as the recorder writes it. L is its length in tokens, P the prompt's."""

    ticket: int
    prompt_position: int
    prompt_id: str
    member: int
    messages: tuple[Message, ...]
    prompt_token_ids: IntArray  # [P]
    text: str
    token_ids: IntArray  # [L]
    rollout_logprobs: FloatArray  # [L]
    learner_logprobs: FloatArray | None  # [L], None where the learner did not see the completion
    versions: IntArray  # [L]
    finish: FinishReason
    oldest_version: int | None  # None for a completion without tokens
    lag: int | None  # learner version - oldest_version
    node: str
    trained: bool
    advantage: float | None
    channel_advantages: Mapping[str, float] = field(default_factory=dict)
    scores: Mapping[str, Score] = field(default_factory=dict)


def rows_from_groups(
    groups: Sequence[RolloutGroup],
    *,
    learner_version: int,
    advantages: Mapping[Member, float],
    channel_advantages: Mapping[Member, Mapping[str, float]] | None = None,
    learner_logprobs: Mapping[Member, FloatArray] | None = None,
    trained: Collection[Member] | None = None,
) -> list[SampleRow]:
    """One row for every completion of `groups`, in their order.

    `learner_version` is that at which the groups were consumed. A member is identified by its group's ticket
    and its place in `group.completions`. A member absent from `advantages` has none. `trained` names the
    members that stood in the loss; None: all that have an advantage. Raises ValueError where log-probs of the
    learner do not have the completion's length, which would mean they belong to another member.
    """
    learner_logprobs = learner_logprobs or {}
    trained = advantages.keys() if trained is None else trained
    rows = []
    for group in groups:
        for member, completion in enumerate(group.completions):
            key = (group.ticket, member)
            logprobs = learner_logprobs.get(key)
            if logprobs is not None and len(logprobs) != len(completion.token_ids):
                raise ValueError(
                    f"ticket {group.ticket}, member {member}: {len(logprobs)} learner log-probs for "
                    f"{len(completion.token_ids)} tokens"
                )
            oldest = completion.oldest_version if len(completion.versions) else None
            rows.append(
                SampleRow(
                    ticket=group.ticket,
                    prompt_position=group.prompt.position,
                    prompt_id=group.prompt.prompt_id,
                    member=member,
                    messages=group.prompt.messages,
                    prompt_token_ids=group.prompt.token_ids,
                    text=completion.text,
                    token_ids=completion.token_ids,
                    rollout_logprobs=completion.logprobs,
                    learner_logprobs=logprobs,
                    versions=completion.versions,
                    finish=completion.finish,
                    oldest_version=oldest,
                    lag=None if oldest is None else learner_version - oldest,
                    node=group.node,
                    trained=key in trained,
                    advantage=advantages.get(key),
                    channel_advantages=(channel_advantages or {}).get(key, {}),
                    scores=completion.scores,
                )
            )
    return rows
