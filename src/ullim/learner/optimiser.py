"""AdamW on the float32 shards, with linear warm-up and one global gradient norm.

Works on each rank's own part of every parameter as a plain tensor: element by element there is nothing to know of the
others, and the dispatch of distributed tensors would cost more than the arithmetic. Only the norm is a collective.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ullim.config.learner import LearnerConfig
from ullim.learner.ranks import Ranks


class Optimiser:
    """AdamW as the recipe says. Matrices decay; vectors (norm scales, biases) never do, having no direction to shrink.

    `parameters` are the shards by name; `moments` gives the state by the same names.
    """

    def __init__(self, parameters: Mapping[str, DTensor], config: LearnerConfig, ranks: Ranks) -> None:
        self._parameters = dict(parameters)
        self._config, self._ranks = config, ranks
        self._own = [nn.Parameter(parameter.to_local().detach()) for parameter in self._parameters.values()]
        groups = [
            {"params": [own for own in self._own if own.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [own for own in self._own if own.ndim < 2], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=config.learning_rate, betas=config.betas, fused=True
        )

    def learning_rate(self, version: int) -> float:
        """Of the step that leaves `version`: rising linearly over the first `warmup_steps`, constant from then on."""
        warmup = self._config.warmup_steps
        return self._config.learning_rate * min(1.0, (version + 1) / (warmup + 1))

    def gradient_norm(self) -> float:
        """Global norm over all parameters and ranks; a collective of all ranks, the same number on each."""
        norms = torch._foreach_norm(self._gradients())
        squares = torch.zeros((), dtype=torch.float64, device=self._ranks.device)
        for norm in norms:
            squares += norm.double().square()
        return math.sqrt(float(self._ranks.total(squares)))

    def update(self, version: int, gradient_norm: float) -> None:
        """Clip the gradients to the configured norm and take one step."""
        gradients = self._gradients()
        if gradient_norm > self._config.max_grad_norm:
            torch._foreach_mul_(gradients, self._config.max_grad_norm / gradient_norm)
        for own, gradient in zip(self._own, gradients, strict=True):
            own.grad = gradient
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate(version)
        self._adamw.step()

    def forget_gradients(self) -> None:
        """Free all gradients."""
        for own, parameter in zip(self._own, self._parameters.values(), strict=True):
            own.grad = parameter.grad = None

    @property
    def updates(self) -> int:
        """Updates taken so far: AdamW's bias correction counts them."""
        return int(next(self._states())["step"])

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self._states():
            state["step"].fill_(float(count))

    def moments(self) -> dict[str, DTensor]:
        """Both moments by "exp_avg/NAME" and "exp_avg_sq/NAME", sharded like the parameter and sharing the memory.

        Before the first update they are made, as zeros, so that there is something to load into.
        """
        found: dict[str, DTensor] = {}
        for (name, parameter), state in zip(self._parameters.items(), self._states(), strict=True):
            for kind in ("exp_avg", "exp_avg_sq"):
                found[f"{kind}/{name}"] = DTensor.from_local(
                    state[kind],
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
        return found

    def _gradients(self) -> list[Tensor]:
        """Every rank's own part of each gradient; a parameter that nothing used has a gradient of 0."""
        return [
            torch.zeros_like(own) if parameter.grad is None else _local(parameter.grad)
            for own, parameter in zip(self._own, self._parameters.values(), strict=True)
        ]

    def _states(self) -> Iterator[dict[str, Tensor]]:
        for own in self._own:
            state: dict[str, Tensor] = self._adamw.state[own]
            if not state:
                # What AdamW's own first step would make; the fused kernel wants the count beside the parameter.
                state["step"] = torch.zeros((), dtype=torch.float32, device=own.device)
                state["exp_avg"] = torch.zeros_like(own)
                state["exp_avg_sq"] = torch.zeros_like(own)
            yield state


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
