"""The composed loss: a float64 loop as reference, one test per switch, and invariance under any cut of the batch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ullim.objective.losses import clip_cov_tokens, kl_cov_tokens
from ullim.objective.policy_loss import LossSettings, policy_loss
from ullim.objective.tally import Tally

NAN = float("nan")


class Step:
    """A random step of `rows` completions with ragged lengths and some missing engine log-probs."""

    def __init__(self, seed=0, rows=6, width=5):
        random = np.random.default_rng(seed)
        noise = lambda scale: torch.from_numpy(random.normal(0, scale, (rows, width)))  # noqa: E731
        self.old = torch.from_numpy(-3 * random.random((rows, width)) - 0.1)
        self.logp = self.old + noise(0.3)
        self.rollout = self.old + noise(0.5)
        self.rollout[torch.from_numpy(random.random((rows, width)) < 0.1)] = NAN
        self.ref = self.old + noise(0.5)
        self.entropy = torch.from_numpy(random.random((rows, width)))
        self.advantages = torch.from_numpy(random.normal(size=rows))
        lengths = torch.from_numpy(random.integers(0, width + 1, rows))
        self.mask = torch.arange(width)[None] < lengths[:, None]

    def denominator(self, aggregation):
        return {
            "token-mean": int(self.mask.sum()),
            "sequence-mean": int(self.mask.any(-1).sum()),
            "constant": self.mask.numel(),
        }[aggregation] or 1

    def run(self, options, rows=slice(None), chosen=None, leaves=None, **changes):
        """Loss, gradients by logp and entropy (full size), tally, over the given rows of this step."""
        logp, entropy = leaves or (self.logp.clone().requires_grad_(), self.entropy.clone().requires_grad_())
        given = {"old_logp": self.old, "rollout_logp": self.rollout, "ref_logp": self.ref} | changes
        loss, tally = policy_loss(
            logp[rows],
            entropy[rows],
            **{name: None if value is None else value[rows] for name, value in given.items()},
            advantages=self.advantages[rows],
            mask=self.mask[rows],
            settings=options,
            denominator=self.denominator(options.aggregation),
            chosen=None if chosen is None else chosen[rows],
        )
        loss.backward()
        return loss.item(), logp.grad, entropy.grad, tally


def reference(step, s, old=None, rollout=None):
    """Token by token with math.exp; token-level ratio and correction, token-mean or sequence-mean."""
    old, rollout = step.old if old is None else old, step.rollout if rollout is None else rollout
    tokens = int(step.mask.sum())
    sequences = int(step.mask.any(-1).sum())
    total = 0.0
    for row in range(len(step.mask)):
        count = int(step.mask[row].sum())
        for t in range(count):
            logp, o, mu, ref = (float(x[row, t]) for x in (step.logp, old, rollout, step.ref))
            anchor = mu if s.anchor == "rollout" and not math.isnan(mu) else o
            ratio, advantage = math.exp(logp - anchor), float(step.advantages[row])
            clipped = min(max(ratio, 1 - s.clip_low), 1 + s.clip_high)
            weight = 1.0
            if s.correction == "truncate" and not math.isnan(mu):
                weight = min(math.exp(o - mu), s.correction_cap)
            token = -weight * min(ratio * advantage, clipped * advantage)
            token += s.kl_coefficient * (math.exp(ref - logp) - 1 - (ref - logp))
            token -= s.entropy_coefficient * float(step.entropy[row, t])
            total += token / (tokens if s.aggregation == "token-mean" else count * sequences)
    return total


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"aggregation": "sequence-mean"},
        {"correction": "none"},
        {"correction_cap": 1.1},
        {"anchor": "rollout", "correction": "none"},
        {"kl_coefficient": 0.3, "entropy_coefficient": 0.2},
    ],
)
def test_agrees_with_a_loop(options, seed):
    step, chosen = Step(seed), LossSettings(**options)
    assert step.run(chosen)[0] == pytest.approx(reference(step, chosen), rel=1e-9)


def test_one_token_hand_worked():
    # π/π_old = 1.1, π_old/μ = 4 → capped 2; A = 3; loss = −2·1.1·3; slope by log π the same.
    logp = torch.tensor([[math.log(0.44)]], dtype=torch.float64, requires_grad=True)
    args = [torch.tensor([[math.log(p)]], dtype=torch.float64) for p in (0.4, 0.1)]
    loss, tally = policy_loss(
        logp, torch.ones(1, 1), *args, None, torch.tensor([3.0]), torch.ones(1, 1, dtype=torch.bool),
        settings=LossSettings(), denominator=1,
    )  # fmt: skip
    loss.backward()
    assert loss.item() == pytest.approx(-6.6)
    assert logp.grad.item() == pytest.approx(-6.6)
    numbers = tally.finalise()
    assert numbers["loss/policy"] == pytest.approx(-6.6)
    assert numbers["correction/weight_mean_raw"] == pytest.approx(4.0)
    assert numbers["correction/capped_fraction"] == 1.0
    assert numbers["ratio/mean"] == pytest.approx(1.1)
    assert numbers["entropy"] == 1.0
    assert "kl/reference" not in numbers


def test_without_old_logprobs_the_policy_itself_is_the_start():
    step = Step(1)
    options = LossSettings()
    given, implied = step.run(options, old_logp=step.logp), step.run(options, old_logp=None)
    assert given[0] == implied[0]
    assert torch.equal(given[1], implied[1])
    assert implied[3].finalise()["ratio/mean"] == 1.0


def test_ppo_is_keeps_the_engine_inside_the_clip():
    """With μ in the clip a token far from the engine loses its gradient; with a correction beside it, it does not."""
    step = Step(2, rows=1, width=1)
    step.mask[:] = True
    step.logp = step.old.clone()
    step.rollout = step.old - 1.0  # π/μ = e
    step.advantages[:] = 1.0
    inside = step.run(LossSettings(anchor="rollout", correction="none"))
    beside = step.run(LossSettings())
    assert inside[0] == pytest.approx(-1.28)
    assert inside[1].item() == 0.0
    assert beside[0] == pytest.approx(-2.0)
    assert beside[1].item() == pytest.approx(-2.0)
    assert inside[3].finalise()["ratio/clip_high_fraction"] == 1.0
    # diagnostics of the mismatch do not depend on where the correction is made
    assert inside[3].finalise()["correction/weight_mean_raw"] == pytest.approx(math.e)


def test_masked_places_change_nothing():
    step = Step(3)
    for options in (
        LossSettings(kl_coefficient=0.1, kl_kind="k2", entropy_coefficient=0.1, ratio_level="sequence"),
        LossSettings(anchor="rollout", correction="none", aggregation="sequence-mean"),
        LossSettings(correction="mask", correction_level="geometric", correction_floor=0.5),
    ):
        clean = step.run(options)
        for poison in (NAN, math.inf, -math.inf):
            dirty = Step(3)
            for tensor in (dirty.logp, dirty.old, dirty.rollout, dirty.ref, dirty.entropy):
                tensor[~dirty.mask] = poison
            found = dirty.run(options)
            assert found[0] == clean[0]
            assert torch.equal(found[1], clean[1])
            assert found[3].finalise() == clean[3].finalise()


SWITCHES = [
    {"aggregation": "token-mean", "kl_coefficient": 0.1, "entropy_coefficient": 0.05},
    {"aggregation": "sequence-mean", "ratio_level": "sequence", "correction_level": "sequence"},
    {"aggregation": "constant", "ratio_level": "sequence_token", "kl_coefficient": 0.1, "kl_kind": "k2"},
    {"anchor": "rollout", "correction": "none", "dual_clip": 3.0},
    {"correction": "mask", "correction_level": "geometric", "correction_floor": 0.8},
    {"exploration": "clip_cov"},
    {"exploration": "kl_cov", "kl_cov_coefficient": 0.5},
]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from(SWITCHES), st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_any_partition_gives_the_same_loss_gradient_and_diagnostics(seed, switches, owner):
    step, options = Step(seed), LossSettings(**switches)
    chosen = {
        "none": None,
        "clip_cov": clip_cov_tokens(
            step.old, step.advantages, step.mask, fraction=0.3, low=0.0, high=9.0, generator=torch.Generator()
        ),
        "kl_cov": kl_cov_tokens(step.old, step.advantages, step.mask, fraction=0.3),
    }[options.exploration]
    loss, grad, entropy_grad, tally = step.run(options, chosen=chosen)
    leaves = (step.logp.clone().requires_grad_(), step.entropy.clone().requires_grad_())
    pieces = [
        step.run(options, rows=[r for r in range(6) if owner[r] == part], chosen=chosen, leaves=leaves)
        for part in range(4)
    ]
    assert sum(piece[0] for piece in pieces) == pytest.approx(loss, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(leaves[0].grad, grad, rtol=1e-9, atol=1e-12)
    if entropy_grad is not None:
        torch.testing.assert_close(leaves[1].grad, entropy_grad, rtol=1e-9, atol=1e-12)
    merged = Tally.merge_all(piece[3] for piece in pieces).finalise()
    assert merged == {k: pytest.approx(v, rel=1e-9, abs=1e-12) for k, v in tally.finalise().items()}


def test_parts_add_up_to_the_loss():
    step = Step(4)
    loss, *_, tally = step.run(LossSettings(kl_coefficient=0.3, entropy_coefficient=0.2))
    numbers = tally.finalise()
    assert numbers["loss/policy"] + numbers["loss/kl"] + numbers["loss/entropy"] == pytest.approx(loss)
    assert numbers["loss/kl"] > 0 > numbers["loss/entropy"]


def test_exploration_changes_only_the_chosen():
    step = Step(5)
    step.mask[:] = True
    chosen = torch.zeros_like(step.mask)
    chosen[1, 2] = True
    plain = step.run(LossSettings())
    clipped = step.run(LossSettings(exploration="clip_cov"), chosen=chosen)
    assert clipped[1][1, 2] == 0.0
    assert torch.equal(clipped[1][~chosen], plain[1][~chosen])
    penalised = step.run(LossSettings(exploration="kl_cov"), chosen=chosen)
    ratio = math.exp(float(step.logp[1, 2] - step.old[1, 2]))
    assert penalised[1][1, 2] - plain[1][1, 2] == pytest.approx((ratio - 1) / step.mask.numel())
    assert torch.equal(penalised[1][~chosen], plain[1][~chosen])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchor": "rollout"}, "write correction='none'"),
        ({"correction_level": "geometric"}, "mode='mask' only"),
        ({"clip_low": 2.0}, "clip_low"),
        ({"dual_clip": 0.5}, "dual_clip"),
        ({"ratio_level": "geometric"}, "ratio_level must be one of"),
        ({"anchor": "new"}, "anchor must be one of"),
        ({"aggregation": "mean"}, "aggregation must be one of"),
        ({"kl_kind": "k9"}, "kl_kind must be one of"),
        ({"exploration": "noise"}, "exploration must be one of"),
        ({"kl_coefficient": -1.0}, "kl_coefficient must be"),
        ({"entropy_coefficient": NAN}, "entropy_coefficient must be"),
    ],
)
def test_contradictory_settings_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        LossSettings(**options)


def test_what_the_settings_need_and_do_not_get_is_named():
    step = Step(6)
    with pytest.raises(ValueError, match="ref_logp is needed"):
        step.run(LossSettings(kl_coefficient=0.1), ref_logp=None)
    with pytest.raises(ValueError, match="kl_cov_tokens over the whole step"):
        step.run(LossSettings(exploration="kl_cov"))
    with pytest.raises(ValueError, match="exploration is 'none'"):
        step.run(LossSettings(), chosen=step.mask)
