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

LEAST_LOG_PROB = -1e30
"""Stands for −inf where it is multiplied by a probability of 0; finite in float32."""


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

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, buffers: "_Buffers") -> Tensor:
        """[C, D] to [C, V] in at least float32, in a buffer that the caller may overwrite."""
        product = torch.mm(hidden, weight.T, out=buffers.product[: len(hidden)])
        z = product if product.dtype == buffers.logits.dtype else buffers.logits[: len(hidden)].copy_(product)
        if bias is not None:
            z.add_(bias)
        if self.softcap is not None:
            return z.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)
        factor = self.scale / self.temperature
        return z if factor == 1.0 else z.mul_(factor)

    def to_product(self, grad: Tensor, logits: Tensor | None) -> Tensor:
        """Gradient by the scaled logits to gradient by hidden · Wᵀ, in place; `logits` only matters with a softcap."""
        factor = self.scale / self.temperature
        if factor != 1.0:
            grad.mul_(factor)
        if self.softcap is not None and logits is not None:
            slope = logits.mul_(self.temperature / self.softcap).square_().neg_().add_(1.0)
            grad.mul_(slope)
        return grad


class _Buffers:
    """What one chunk needs, made once for all of them: [C, V] in the dtype of the product and in float32.

    Fresh blocks of that size come from the operating system page by page, which costs more than the arithmetic on them.
    """

    def __init__(self, hidden: Tensor, weight: Tensor, chunk_tokens: int) -> None:
        shape = (min(chunk_tokens, len(hidden)), len(weight))
        self.product = hidden.new_empty(shape)
        self.logits = (
            self.product if hidden.dtype == _promoted(hidden) else hidden.new_empty(shape, dtype=torch.float32)
        )


class _TokenLogprobs(torch.autograd.Function):
    """Forward keeps its inputs and two numbers per token; backward builds each chunk's softmax anew."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, head: _Head
    ) -> tuple[Tensor, Tensor]:
        compute_weight = weight.to(hidden.dtype)
        logp, entropy, normaliser = (hidden.new_empty(len(hidden), dtype=_promoted(hidden)) for _ in range(3))
        buffers = _Buffers(hidden, weight, head.chunk_tokens)
        by_token = torch.empty_like(buffers.logits)

        def chunk(part: slice) -> None:
            z = head.logits(hidden[part], compute_weight, bias, buffers)
            highest = z.amax(dim=-1)
            log_probs = torch.log_softmax(z, dim=-1, out=by_token[: len(z)])
            normaliser[part] = highest - log_probs.amax(dim=-1)
            logp[part] = log_probs.gather(-1, targets[part, None]).squeeze(-1)
            # A forbidden token (log-prob −inf) must add 0 · something finite.
            probs = torch.exp(log_probs, out=z)
            entropy[part] = -probs.mul_(log_probs.clamp_(min=LEAST_LOG_PROB)).sum(dim=-1)

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
        grad_weight = _ProductSum(weight, hidden) if ctx.needs_input_grad[1] else None
        buffers = _Buffers(hidden, weight, head.chunk_tokens)

        def chunk(part: slice) -> None:
            z = head.logits(hidden[part], compute_weight, bias, buffers)
            # The softcap's slope needs z again, after its buffer has become the probabilities.
            capped = z.clone() if head.softcap is not None else None
            grad = _grad_by_logits(
                z.sub_(normaliser[part, None]).exp_(),
                targets[part],
                entropy[part],
                None if grad_logp is None else grad_logp[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            grad = head.to_product(grad, capped)
            if grad.dtype != hidden.dtype:
                grad = buffers.product[: len(grad)].copy_(grad)
            if grad_hidden is not None:
                torch.mm(grad, compute_weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight.add(grad.T, hidden[part])

        with _no_autocast(hidden):
            for part in _chunks(len(hidden), head.chunk_tokens):
                chunk(part)
        return grad_hidden, None if grad_weight is None else grad_weight.rounded(), None, None, None


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


class _ProductSum:
    """Σ left · right over the chunks, [V, D], in float32: bfloat16 would drop what is 256 times smaller than the sum.

    A lone chunk has nothing to be added to and is taken as it is.
    """

    def __init__(self, weight: Tensor, hidden: Tensor) -> None:
        self._weight = weight
        self._product = weight.new_empty(weight.shape, dtype=hidden.dtype)
        self._total: Tensor | None = None
        self._empty = True

    def add(self, left: Tensor, right: Tensor) -> None:
        """Add one chunk's product."""
        if not self._empty and self._total is None:
            self._total = _promote(self._product)
        if self._total is not None and self._total.dtype == left.dtype:
            self._total.addmm_(left, right)
            return
        torch.mm(left, right, out=self._product)
        if self._total is not None:
            self._total += self._product
        self._empty = False

    def rounded(self) -> Tensor:
        """The sum in the dtype of the weight."""
        if self._empty:
            return torch.zeros_like(self._weight)
        return (self._product if self._total is None else self._total).to(self._weight.dtype)


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _promoted(values: Tensor) -> torch.dtype:
    return torch.float64 if values.dtype == torch.float64 else torch.float32


def _promote(values: Tensor) -> Tensor:
    return values.to(_promoted(values))


def _no_autocast(like: Tensor) -> contextlib.AbstractContextManager[None]:
    """Autocast would cover forward but not backward, and the two would disagree about the logits."""
    return torch.autocast(like.device.type, enabled=False)
