"""`token_logprobs` against a float64 reference, numerical gradients, and a watch on every tensor that it makes."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ullim.objective.logprobs import entropy_from_logits, token_logprobs

N, D, V = 13, 8, 37
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scaled": {"logit_scale": 0.3},
    "softcap": {"logit_softcap": 2.0},
    "all": {"bias": True, "logit_scale": 1.7, "logit_softcap": 3.0},
}


def inputs(dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, V, (N,), generator=generator)
    bias = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, bias


def options(head, bias):
    return HEADS[head] | ({"bias": bias} if "bias" in HEADS[head] else {})


def reference(hidden, weight, targets, temperature, bias=None, logit_scale=1.0, logit_softcap=None):
    """Everything at once by autograd, as the textbook has it."""
    z = hidden @ weight.T
    z = (z if bias is None else z + bias) * logit_scale
    if logit_softcap is not None:
        z = logit_softcap * torch.tanh(z / logit_softcap)
    log_probs = torch.log_softmax(z / temperature, dim=-1)
    return log_probs[torch.arange(len(targets)), targets], -(log_probs.exp() * log_probs).sum(-1)


def test_hand_worked():
    # logits ln 1, ln 2, ln 5 → p = 1/8, 2/8, 5/8
    hidden = torch.tensor([[1.0], [1.0]])
    weight = torch.tensor([[1.0], [2.0], [5.0]]).log()
    logp, entropy = token_logprobs(hidden, weight, torch.tensor([2, 0]), temperature=1.0, chunk_tokens=1)
    np.testing.assert_allclose(logp.numpy(), [math.log(5 / 8), math.log(1 / 8)], rtol=1e-6)
    expected = -sum(p * math.log(p) for p in (1 / 8, 2 / 8, 5 / 8))
    np.testing.assert_allclose(entropy.numpy(), [expected] * 2, rtol=1e-6)
    # temperature ½ squares the odds: 1, 4, 25
    logp, _ = token_logprobs(hidden, weight, torch.tensor([2, 0]), temperature=0.5, chunk_tokens=8)
    np.testing.assert_allclose(logp.numpy(), [math.log(25 / 30), math.log(1 / 30)], rtol=1e-6)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("chunk", [1, 4, N, 100])
def test_values_and_gradients_agree_with_the_reference(head, chunk):
    hidden, weight, targets, bias = inputs()
    generator = torch.Generator().manual_seed(5)
    by_logp, by_entropy = torch.randn(2, N, generator=generator, dtype=torch.float64)
    expected = reference(hidden, weight, targets, 0.7, **options(head, bias))
    found = token_logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=chunk, **options(head, bias))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    for cotangents in ((by_logp, by_entropy), (by_logp, None), (None, by_entropy)):
        kept = [i for i in range(2) if cotangents[i] is not None]
        gradients = [
            torch.autograd.grad(
                [outputs[i] for i in kept], [hidden, weight], [cotangents[i] for i in kept], retain_graph=True
            )
            for outputs in (found, expected)
        ]
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-9)


def test_numerical_gradient():
    hidden, weight, targets, bias = inputs()

    def run(h, w):
        return token_logprobs(h, w, targets, temperature=0.8, chunk_tokens=5, **options("all", bias))

    assert torch.autograd.gradcheck(run, (hidden, weight))


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient(frozen):
    hidden, weight, targets, _ = inputs()
    kept = {"hidden": weight, "weight": hidden}[frozen]
    {"hidden": hidden, "weight": weight}[frozen].requires_grad_(False)
    logp, _ = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=4)
    (found,) = torch.autograd.grad(logp.sum(), kept)
    (expected,) = torch.autograd.grad(reference(hidden, weight, targets, 1.0)[0].sum(), kept)
    torch.testing.assert_close(found, expected)


def test_float32_is_within_float32_of_float64():
    exact = reference(*inputs()[:3], 1.0)
    found = token_logprobs(*inputs(torch.float32)[:3], temperature=1.0, chunk_tokens=4)
    assert found[0].dtype == found[1].dtype == torch.float32
    torch.testing.assert_close(found[0].double(), exact[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-5, atol=1e-5)


def test_bfloat16_takes_a_float32_softmax_of_the_models_own_logits():
    hidden, weight, targets, _ = inputs(torch.bfloat16)
    logits = (hidden @ weight.T).double()  # what the model's own head gives, rounded to bfloat16
    log_probs = torch.log_softmax(logits, -1)
    logp, entropy = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=N)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.double(), log_probs[torch.arange(N), targets], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(log_probs.exp() * log_probs).sum(-1), rtol=1e-5, atol=1e-5)
    gradients = torch.autograd.grad(logp.sum() + entropy.sum(), [hidden, weight])
    assert [g.dtype for g in gradients] == [torch.bfloat16] * 2


def test_the_heads_gradient_is_summed_in_float32_over_chunks():
    """A running sum in bfloat16 sticks at 128: adding ½ to it rounds back to 128."""
    tokens = 600
    hidden = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logp, _ = token_logprobs(hidden, weight, torch.zeros(tokens, dtype=torch.int64), temperature=1.0, chunk_tokens=1)
    (found,) = torch.autograd.grad(logp.sum(), weight)
    assert found.flatten().tolist() == [tokens / 2, -tokens / 2]


def test_mixed_dtypes_follow_hidden_and_return_each_its_own():
    hidden, weight, targets, _ = inputs(torch.bfloat16)
    master = weight.detach().float().requires_grad_()
    logp, _ = token_logprobs(hidden, master, targets, temperature=1.0, chunk_tokens=4)
    plain, _ = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=4)
    assert torch.equal(logp, plain)
    gradients = torch.autograd.grad(logp.sum(), [hidden, master])
    assert [g.dtype for g in gradients] == [torch.bfloat16, torch.float32]


def test_autocast_does_not_come_between_forward_and_backward():
    hidden, weight, targets, _ = inputs(torch.float32)
    plain, _ = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=4)
    assert torch.equal(found, plain)


def test_forbidden_tokens_and_huge_logits_stay_finite():
    hidden, weight, targets, bias = inputs()
    bias[targets[0] - 1] = -math.inf
    for scale in (1.0, 1e4):
        found = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=4, bias=bias, logit_scale=scale)
        kept = targets != (targets[0] - 1) % V
        assert found[0][kept].isfinite().all()
        assert found[1].isfinite().all()
        gradients = torch.autograd.grad(found[0][kept].sum() + found[1].sum(), [hidden, weight])
        assert all(g.isfinite().all() for g in gradients)


def test_no_tokens():
    hidden, weight, targets, _ = inputs()
    logp, entropy = token_logprobs(hidden[:0], weight, targets[:0], temperature=1.0, chunk_tokens=4)
    (logp.sum() + entropy.sum()).backward()
    assert logp.shape == entropy.shape == (0,)
    assert not weight.grad.any()


class _Largest(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.numel())
        return result


def test_nothing_of_size_tokens_times_vocabulary_is_ever_made():
    tokens, vocabulary, chunk = 64, 200, 4
    hidden = torch.randn(tokens, D, requires_grad=True)
    weight = torch.randn(vocabulary, D, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with _Largest() as watch:
        logp, entropy = token_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=chunk, logit_softcap=30.0)
        (logp.sum() + entropy.sum()).backward()
    assert chunk * vocabulary <= watch.elements <= max(chunk * vocabulary, vocabulary * D)
    with _Largest() as watch:  # and the watch does see what the plain computation makes
        sum(out.sum() for out in reference(hidden, weight, targets, 1.0)).backward()
    assert watch.elements == tokens * vocabulary


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(N, D + 1)}, r"hidden must be \[N, D\]"),
        ({"targets": torch.zeros(N + 1, dtype=torch.int64)}, r"targets must be"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"chunk_tokens": 0}, "chunk_tokens must be"),
        ({"bias": torch.zeros(V + 1)}, "bias must be"),
        ({"logit_softcap": 0.0}, "logit_softcap must be"),
    ],
)
def test_bad_arguments_are_named(change, message):
    hidden, weight, targets, _ = inputs()
    call = {"hidden": hidden, "lm_head_weight": weight, "targets": targets, "temperature": 1.0, "chunk_tokens": 4}
    with pytest.raises(ValueError, match=message):
        token_logprobs(**(call | change))


def test_entropy_from_logits():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, -math.inf], [100.0, 0.0, 0.0, 0.0]])
    logits.requires_grad_()
    found = entropy_from_logits(logits)
    np.testing.assert_allclose(found.detach().numpy(), [math.log(4), math.log(2), 0.0], atol=1e-6)
    found.sum().backward()
    assert logits.grad.isfinite().all()
    assert entropy_from_logits(logits.bfloat16()).dtype == torch.float32
    assert entropy_from_logits(torch.zeros(2, 3, 5)).shape == (2, 3)


def test_entropy_from_logits_gradient():
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(entropy_from_logits, (logits,))
