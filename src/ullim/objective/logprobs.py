"""Log-probs and entropy of sampled tokens, without ever holding the logits of all tokens.

A vocabulary of 150k turns 16k tokens into 10 GB of float32 logits, and autograd would keep several copies. Here the
output head, the softmax and their gradients run over `chunk_tokens` tokens at a time; backward recomputes what it
needs. Peak beyond inputs and outputs: two float32 buffers [chunk_tokens × V] (three with a softcap), a float32
gradient of the head [V × D], and for a half-precision head two more of those in its own dtype.
`benchmarks/logprobs_memory.py` measures it.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def entropy_from_logits(logits: Tensor) -> Tensor:
    """−Σ p ln p of softmax(logits) over the last axis, in nats: logits [..., V] to [...], at least float32.

    −inf logits (forbidden tokens) count as probability 0. Differentiable by autograd; keeps [..., V] in memory.
    """
    log_probs = torch.log_softmax(_promote(logits), dim=-1)
    # 0 · −inf: a forbidden token must add 0, and its NaN must not come back through the product's gradient.
    possible = log_probs.isfinite()
    log_probs = torch.where(possible, log_probs, 0.0)
    return -(torch.where(possible, log_probs.exp(), 0.0) * log_probs).sum(dim=-1)


def token_logprobs(
    hidden: Tensor,
    lm_head_weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    logit_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """ln p(target) and the entropy of p = softmax(z / temperature) for each token.

    z = logit_scale · (hidden · Wᵀ + bias), then softcap · tanh(z / softcap) where a softcap is given: the heads of
    Llama and Qwen (neither), Cohere and Granite (scale), Gemma 2 (softcap). The product is taken in the dtype of
    `hidden` as the model itself would take it; everything after it in float32.

    Args:
        hidden: [N, D], last hidden states, already normed; float32, bfloat16 (or float64 for gradient checks).
        lm_head_weight: [V, D].
        targets: int [N], in [0, V).
        temperature: of the sampling; > 0.
        chunk_tokens: tokens per chunk; bounds memory, changes no value but for rounding.
        bias: [V], part of the head; no gradient is taken (no supported model trains one).
        logit_scale: factor on the logits, for models that divide give 1 / divisor.
        logit_softcap: bound of |logit|, > 0.

    Returns:
        (logp [N], entropy [N]), nats, at least float32. Both are differentiable once, to `hidden` and `lm_head_weight`;
        the head's gradient is summed over chunks in float32 and rounded once.

    Raises:
        ValueError: wrong shapes, non-positive temperature, chunk or softcap.
    """
    if hidden.dim() != 2 or lm_head_weight.dim() != 2 or hidden.shape[1] != lm_head_weight.shape[1]:
        raise ValueError(
            f"hidden must be [N, D] and lm_head_weight [V, D], got {tuple(hidden.shape)}, {tuple(lm_head_weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets must be [N] = [{hidden.shape[0]}], got {tuple(targets.shape)}")
    if bias is not None and (bias.shape != lm_head_weight.shape[:1] or bias.requires_grad):
        raise ValueError(f"bias must be [V] = [{lm_head_weight.shape[0]}] without gradient, got {tuple(bias.shape)}")
    if not temperature > 0.0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
    if logit_softcap is not None and not logit_softcap > 0.0:
        raise ValueError(f"logit_softcap must be positive, got {logit_softcap}")
    head = _Head(temperature, chunk_tokens, logit_scale, logit_softcap)
    logp, entropy = _TokenLogprobs.apply(hidden, lm_head_weight, targets, bias, head)  # type: ignore[no-untyped-call]
    return logp, entropy


@dataclass(frozen=True, slots=True)
class _Head:
    """From hidden states to scaled logits z / temperature, and the derivative of all but the product."""

    temperature: float
    chunk_tokens: int
    scale: float
    softcap: float | None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """[C, D] to [C, V] in at least float32, in a buffer that the caller may overwrite."""
        z = _promote(hidden @ weight.T)
        if bias is not None:
            z.add_(bias)
        if self.softcap is None:
            return z.mul_(self.scale / self.temperature)
        return z.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def to_product(self, grad: Tensor, logits: Tensor | None) -> Tensor:
        """Gradient by the scaled logits to gradient by hidden · Wᵀ, in place; `logits` only matters with a softcap."""
        grad.mul_(self.scale / self.temperature)
        if self.softcap is not None and logits is not None:
            slope = logits.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0)
            grad.mul_(slope)
        return grad


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps its inputs and two numbers per token; backward builds each chunk's softmax anew.

    A chunk's work is a function of its own, so that its buffers are gone before the next chunk's are made; as names in
    a loop they would live into the next turn and double the peak.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, head: _Head
    ) -> tuple[Tensor, Tensor]:
        compute_weight = weight.to(hidden.dtype)
        kept = _promote(hidden.new_empty(0)).dtype
        logp, entropy, normaliser = (torch.empty(len(hidden), dtype=kept, device=hidden.device) for _ in range(3))

        def chunk(part: slice) -> None:
            z = head.logits(hidden[part], compute_weight, bias)
            normaliser[part] = torch.logsumexp(z, dim=-1)
            logp[part] = z.gather(-1, targets[part, None]).squeeze(-1) - normaliser[part]
            probs = z.sub_(normaliser[part, None]).exp_()
            entropy[part] = torch.special.entr(probs).sum(dim=-1)  # entr(0) = 0, so −inf logits do no harm

        with _no_autocast(hidden):
            for part in _chunks(len(hidden), head.chunk_tokens):
                chunk(part)
        ctx.save_for_backward(hidden, weight, targets, bias, normaliser, entropy)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, bias, normaliser, entropy = ctx.saved_tensors
        head: _Head = ctx.head
        if grad_logp is None and grad_entropy is None:
            return None, None, None, None, None
        compute_weight = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Chunks are summed in float32: bfloat16 would drop whatever is 256 times smaller than the sum so far.
        grad_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if ctx.needs_input_grad[1] else None

        def chunk(part: slice) -> None:
            z = head.logits(hidden[part], compute_weight, bias)
            # The softcap's slope needs z again, after its buffer has become the probabilities.
            capped = z.clone() if head.softcap is not None else None
            grad = _grad_by_logits(
                z.sub_(normaliser[part, None]).exp_(),
                targets[part],
                entropy[part],
                None if grad_logp is None else grad_logp[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            del z
            grad = head.to_product(grad, capped).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ compute_weight
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, hidden[part])

        with _no_autocast(hidden):
            for part in _chunks(len(hidden), head.chunk_tokens):
                chunk(part)
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None, None


def _grad_by_logits(
    probs: Tensor, targets: Tensor, entropy: Tensor, grad_logp: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """∂/∂z of g_l·ln p_y + g_h·H  =  g_l·(1[y] − p) + g_h·(−p ln p − p·H). Overwrites `probs`."""
    uniform = torch.zeros_like(entropy) if grad_logp is None else grad_logp
    if grad_entropy is None:
        grad = probs.mul_(-uniform[:, None])
    else:
        grad = torch.special.entr(probs).mul_(grad_entropy[:, None])
        grad.sub_(probs.mul_((grad_entropy * entropy + uniform)[:, None]))
    return grad.scatter_add_(-1, targets[:, None], uniform[:, None])


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left · right. Same dtype: in place, which saves a whole [V, D] temporary per chunk."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _promote(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.to(torch.float32)


def _no_autocast(like: Tensor) -> contextlib.AbstractContextManager[None]:
    """Autocast would cover forward but not backward, and the two would disagree about the logits."""
    return torch.autocast(like.device.type, enabled=False)
