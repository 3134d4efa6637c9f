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
# Few slots and 16-token passes: everything queues, splits and moves.
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
def test_few_slots(check: checks.Check) -> None:
    checks.run_check(check, TinySubject(llama, **CRAMPED))


def test_no_memory_for_two() -> None:
    checks.run_check(checks.answers_are_complete, TinySubject(llama, cache_bytes=1024, **CRAMPED))
