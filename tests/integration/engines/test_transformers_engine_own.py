"""What the embedded engine promises beyond the protocol: refusals, failures, defaults, loading from a folder."""

import asyncio
import copy
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from conformance.engine import Answers, collect, request, until
from conformance.tiny import (
    CONTEXT,
    VOCABULARY,
    LetterTokenizer,
    StateDictReceiver,
    TinySubject,
    llama,
    randomised,
    transfer_of,
)
from ullim.engines.transformers import TransformersEngine
from ullim.errors import BadInput, RunFailed
from ullim.weights.manifest import TensorEntry, WeightManifest

PROMPT = [5, 9, 12, 3, 44, 17]


def run(body: Callable[[TransformersEngine], Awaitable[None]], engine: TransformersEngine | None = None) -> None:
    """Run `body` on an engine, 60 s at most."""
    engine = engine or TinySubject(llama).start()

    async def bounded() -> None:
        try:
            await asyncio.wait_for(body(engine), 60)
        finally:
            await engine.close()

    asyncio.run(bounded())


def small_mistral(window: int | None) -> Any:
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        sliding_window=window,
        eos_token_id=None,
    )
    return randomised(MistralForCausalLM(config), 3)


def test_a_model_with_a_short_window_is_refused_and_a_wide_one_is_not() -> None:
    with pytest.raises(BadInput, match="window of 32"):
        TransformersEngine.from_model(small_mistral(32), None)

    async def body(engine: TransformersEngine) -> None:
        assert len((await collect(engine, [request("a", PROMPT)]))["a", 0].token_ids) == 12

    run(body, TransformersEngine.from_model(small_mistral(32), None, max_context=32))


def test_models_without_an_attention_cache_of_our_kind_are_refused() -> None:
    mamba = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, state_size=4))
    with pytest.raises(BadInput, match=r"Mamba.*vLLM"):
        TransformersEngine.from_model(mamba, None, max_context=64)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(BadInput, match=r"Bloom.*vLLM"):
        TransformersEngine.from_model(bloom, None, max_context=64)


def test_a_context_beyond_the_positions_is_refused() -> None:
    with pytest.raises(BadInput, match=f"{CONTEXT} positions"):
        TransformersEngine.from_model(llama(), None, max_context=CONTEXT + 1)


def test_the_models_own_eos_ends_an_answer_unless_the_caller_names_others() -> None:
    model = randomised(llama(), 1)

    async def free(engine: TransformersEngine) -> None:
        tokens.extend((await collect(engine, [request("a", PROMPT)]))["a", 0].token_ids)

    async def with_eos(engine: TransformersEngine) -> None:
        stopped = (await collect(engine, [request("a", PROMPT)]))["a", 0]
        assert (stopped.token_ids, stopped.finish) == (tokens[: tokens.index(eos) + 1], "stop")
        other = next(t for t in range(VOCABULARY) if t not in tokens)
        told = (await collect(engine, [request("a", PROMPT, stop_token_ids=(other,))]))["a", 0]
        assert (told.token_ids, told.finish) == (tokens, "length")

    tokens: list[int] = []
    run(free, TransformersEngine.from_model(copy.deepcopy(model), None))
    eos = tokens[4]
    model.generation_config.eos_token_id = [VOCABULARY - 1, eos]
    run(with_eos, TransformersEngine.from_model(model, None))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (request("a", []), "empty"),
        (request("a", [VOCABULARY]), f"0 to {VOCABULARY - 1}"),
        (request("a", [-1]), "from -1"),
        (request("a", PROMPT, n=0), "n is 0"),
        (request("a", PROMPT, tokens=0), "max_new_tokens is 0"),
        (request("a", PROMPT, temperature=-1.0), "temperature"),
        (request("a", PROMPT, temperature=float("nan")), "temperature"),
        (request("a", PROMPT, stop_strings=("",)), "empty string"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_requests_that_cannot_be_served_name_the_field(wrong: Any, says: str) -> None:
    async def body(engine: TransformersEngine) -> None:
        with pytest.raises(BadInput, match=says):
            engine.generate([wrong])

    run(body)


def test_stop_strings_need_a_tokenizer_and_ids_must_differ() -> None:
    async def body(engine: TransformersEngine) -> None:
        with pytest.raises(BadInput, match="tokenizer"):
            engine.generate([request("a", PROMPT, stop_strings=("x",))])
        with pytest.raises(BadInput, match="id of its own"):
            engine.generate([request("a", PROMPT), request("a", PROMPT)])
        await engine.pause()
        first = asyncio.create_task(collect(engine, [request("a", PROMPT)]))
        await until(lambda: engine.load().waiting == 1, "the first request")
        with pytest.raises(BadInput, match="still running"):
            await collect(engine, [request("a", PROMPT)])
        await engine.resume()
        await first

    run(body, TransformersEngine.from_model(randomised(llama(), 1), None))


def test_a_dying_worker_raises_everywhere_and_never_hangs() -> None:
    model = randomised(llama(), 1)
    engine = TransformersEngine.from_model(model, LetterTokenizer(), max_running=2)

    async def body(engine: TransformersEngine) -> None:
        answers: Answers = {}
        running = asyncio.create_task(collect(engine, [request("a", PROMPT, n=2, tokens=200)], answers))
        waiting = asyncio.create_task(collect(engine, [request("b", PROMPT, n=2, tokens=200)]))
        await until(lambda: len(answers) == 2, "first tokens")
        model.model.norm.register_forward_pre_hook(break_down)
        for task in (running, waiting):
            with pytest.raises(ZeroDivisionError, match="broken on purpose"):
                await asyncio.wait_for(task, 20)
        with pytest.raises(RunFailed, match="broken on purpose"):
            engine.load()
        for call in (engine.pause(), engine.resume(), engine.abort(["a"]), collect(engine, [request("c", PROMPT)])):
            with pytest.raises(RunFailed, match="broken on purpose"):
                await call

    run(body, engine)


def break_down(*_: Any) -> None:
    raise ZeroDivisionError("broken on purpose")


def test_broken_weights_stop_the_engine_instead_of_giving_garbage() -> None:
    async def body(engine: TransformersEngine) -> None:
        manifest, state = transfer_of(randomised(llama(), 2))
        state["model.norm.weight"][:] = float("nan")
        await engine.pause()
        await engine.receive_weights(manifest, StateDictReceiver(state), 1)
        await engine.resume()
        with pytest.raises(RunFailed, match="non-finite"):
            await collect(engine, [request("a", PROMPT)])

    run(body)


def test_manifests_that_do_not_fit_are_refused_before_anything_changes() -> None:
    manifest, state = transfer_of(randomised(llama(), 2))
    first, *rest = manifest.entries
    assert manifest.tied == (("lm_head.weight", "model.embed_tokens.weight"),)
    head = TensorEntry("lm_head.weight", (VOCABULARY, 32), "float32")
    wrong = {
        "missing": WeightManifest(tuple(rest), (), 1 << 20),
        "unknown": WeightManifest((*manifest.entries, TensorEntry("extra", (1,), "float32")), manifest.tied, 1 << 20),
        "has shape": WeightManifest((TensorEntry(first.name, (1, 2), "float32"), *rest), manifest.tied, 1 << 20),
        "ties them": WeightManifest((*manifest.entries, head), (), 1 << 20),
    }

    async def body(engine: TransformersEngine) -> None:
        await engine.pause()
        for says, bad in wrong.items():
            with pytest.raises(BadInput, match=says):
                await engine.receive_weights(bad, StateDictReceiver(state), 1)
        await engine.receive_weights(manifest, StateDictReceiver(state), 1)
        with pytest.raises(BadInput, match="older"):
            await engine.receive_weights(manifest, StateDictReceiver(state), 0)

    run(body)


def test_streams_that_stray_from_the_manifest_are_refused() -> None:
    manifest, state = transfer_of(randomised(llama(), 2))

    class Straying(StateDictReceiver):
        def __init__(self, change: Callable[[list[tuple[str, torch.Tensor]]], Any]) -> None:
            super().__init__(state)
            self._change = change

        def receive(self, manifest: WeightManifest) -> Any:
            items = [(entry.name, self._state[entry.name]) for entry in manifest.entries]
            self._change(items)
            return iter(items)

    async def body(engine: TransformersEngine) -> None:
        await engine.pause()
        before = await engine.probe([(np.array(PROMPT), np.array(PROMPT))], 1.0)
        for says, change in {
            "ended after": lambda items: items.pop(),
            "was due": lambda items: items.reverse(),
            "end of the stream": lambda items: items.append(items[0]),
            "due is": lambda items: items.__setitem__(0, (items[0][0], items[0][1][:1])),
        }.items():
            with pytest.raises(BadInput, match=says):
                await engine.receive_weights(manifest, Straying(change), 1)
        after = await engine.probe([(np.array(PROMPT), np.array(PROMPT))], 1.0)
        np.testing.assert_array_equal(before[0], after[0])
        assert engine.version == 0

    run(body)


def test_tied_weights_stay_tied_and_aliases_reach_an_untied_engine() -> None:
    manifest, state = transfer_of(randomised(llama(), 2))
    apart = llama()
    apart.config.tie_word_embeddings = False
    apart.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCABULARY, 32))

    async def body(engine: TransformersEngine) -> None:
        await engine.pause()
        await engine.receive_weights(manifest, StateDictReceiver(state), 1)
        (found,) = await engine.probe([(np.array(PROMPT), np.array([4, 5]))], 1.0)
        expected = TinySubject(llama).reference("new", np.array(PROMPT), np.array([4, 5]), 1.0)
        np.testing.assert_allclose(found, expected, atol=1e-4)

    run(body, TransformersEngine.from_model(randomised(apart, 1), None))
    run(body)


def test_a_reader_cancelled_at_any_moment_leaves_nothing_running() -> None:
    async def body(engine: TransformersEngine) -> None:
        stay = asyncio.create_task(collect(engine, [request("stay", PROMPT, n=2, tokens=100)]))
        for pauses in range(6):
            task = asyncio.create_task(collect(engine, [request("go", PROMPT, n=3, tokens=200)]))
            for _ in range(pauses):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        # A refused second use of an id must not end the first.
        with pytest.raises(BadInput, match="still running"):
            await collect(engine, [request("stay", PROMPT)])
        answers = await stay
        assert {a.finish for a in answers.values()} == {"length"}
        await until(lambda: engine.load().running + engine.load().waiting == 0, "an idle engine")

    run(body)


def test_loading_a_folder(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be loaded"):
        TransformersEngine(tmp_path)
    with pytest.raises(BadInput, match="not a folder"):
        TransformersEngine(tmp_path / "nothing")
    with pytest.raises(BadInput, match="dtype"):
        TransformersEngine(tmp_path, dtype="int4")


def test_waking_an_engine_that_is_awake_and_resuming_one_that_runs_do_nothing() -> None:
    async def body(engine: TransformersEngine) -> None:
        await engine.wake()
        await engine.resume()
        assert len((await collect(engine, [request("a", PROMPT)]))["a", 0].token_ids) == 12
        with pytest.raises(BadInput, match="pause mode"):
            await engine.pause("stop")  # type: ignore[arg-type]

    run(body)


def test_new_weights_while_a_request_has_started_only_some_of_its_members() -> None:
    """The members yet to start must draw their first token from logits of the new weights."""
    subject = TinySubject(llama, max_running=2)

    async def body(engine: TransformersEngine) -> None:
        answers: Answers = {}
        task = asyncio.create_task(collect(engine, [request("a", PROMPT, n=5, tokens=120)], answers))
        await until(lambda: len(answers) == 2, "first tokens")
        await engine.pause()
        await engine.receive_weights(*subject.weights("new"), 1)
        await engine.resume()
        await task
        prompt = np.array(PROMPT, dtype=np.int32)
        for member in range(2, 5):
            answer = answers["a", member]
            assert set(answer.versions) == {1}
            np.testing.assert_allclose(answer.logprobs, subject.reference("new", prompt, answer.ids, 1.0), atol=1e-4)

    run(body, subject.start())


def test_packed_bfloat16_weights_follow_an_update() -> None:
    """A stale packed copy, of the output head above all, would go on answering under the old weights."""
    subject = TinySubject(llama, dtype="bfloat16")
    prompt, completion = np.array(PROMPT, dtype=np.int32), np.arange(60, dtype=np.int32)

    async def body(engine: TransformersEngine) -> None:
        await engine.pause()
        for version, (which, other) in enumerate([("old", "new"), ("new", "old"), ("old", "new")]):
            await engine.receive_weights(*subject.weights(which), version)
            (found,) = await engine.probe([(prompt, completion)], 1.0)
            assert np.abs(found - subject.reference(which, prompt, completion, 1.0)).mean() < 0.1
            assert np.abs(found - subject.reference(other, prompt, completion, 1.0)).mean() > 1

    run(body, subject.start())
