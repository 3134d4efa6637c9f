"""The embedded engine passes the conformance checks, on several architectures and under tight limits."""

import pytest

from conformance import engine as checks
from conformance.tiny import TinySubject, gpt2, gpt_neox, llama, qwen3

ESSENTIAL = (
    checks.logprobs_are_of_the_sampled_distribution,
    checks.seeds_fix_an_answer_whatever_else_runs,
    checks.answers_live_through_an_update,
    checks.probe_scores_under_the_present_weights,
)
# Few slots, 16-token passes and room for some 20 tokens of cache: everything queues, splits, moves, and runs alone.
CRAMPED = {"max_running": 3, "pass_tokens": 16}
CRAMPED_CHECKS = (
    checks.answers_are_complete,
    checks.logprobs_are_of_the_sampled_distribution,
    checks.seeds_fix_an_answer_whatever_else_runs,
    checks.pause_abort_ends_all_with_what_they_have,
    checks.closing_the_iterator_aborts_what_is_left,
)


@pytest.fixture(scope="module")
def subject() -> TinySubject:
    return TinySubject(llama)


@pytest.mark.parametrize("check", checks.ENGINE_CHECKS, ids=lambda check: check.__name__)
def test_llama(check: checks.Check, subject: TinySubject) -> None:
    checks.run_check(check, subject)


@pytest.mark.parametrize("check", ESSENTIAL, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make_model", [gpt_neox, qwen3, gpt2], ids=lambda make: make.__name__)
def test_other_architectures(check: checks.Check, make_model: object) -> None:
    checks.run_check(check, TinySubject(make_model))


@pytest.mark.parametrize("check", CRAMPED_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("cache_bytes", [1 << 30, 1 << 10], ids=["slots", "memory"])
def test_cramped(check: checks.Check, cache_bytes: int) -> None:
    checks.run_check(check, TinySubject(llama, cache_bytes=cache_bytes, **CRAMPED))


def test_bfloat16_with_packed_weights() -> None:
    """The packed copies must follow an update: a stale output head would keep greedy text and give old log-probs."""
    subject = TinySubject(llama, dtype="bfloat16")
    checks.run_check(checks.answers_live_through_an_update, subject)
    checks.run_check(checks.probe_scores_under_the_present_weights, subject)
