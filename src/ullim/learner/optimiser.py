"""AdamW on the float32 shards, with linear warm-up and one global gradient norm."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ullim.config.learner import LearnerConfig


class Optimiser:
    """AdamW as the recipe says. Matrices decay; vectors (norm scales, biases) never do, having no direction to shrink.

    `parameters` are the shards by name; `moments` gives the state by the same names.
    """

    def __init__(self, parameters: Mapping[str, DTensor], config: LearnerConfig) -> None:
        self._parameters = dict(parameters)
        self._config = config
        trained = list(self._parameters.values())
        groups = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
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
        norm = torch.nn.utils.get_total_norm(self._gradients())
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def update(self, version: int, gradient_norm: float) -> None:
        """Clip the gradients to the configured norm and take one step."""
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate(version)
        if gradient_norm > self._config.max_grad_norm:
            torch._foreach_mul_(
                [g.to_local() if isinstance(g, DTensor) else g for g in self._gradients()],
                self._config.max_grad_norm / gradient_norm,
            )
        self._adamw.step()

    def forget_gradients(self) -> None:
        """Free all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def _gradients(self) -> list[Tensor]:
        return [parameter.grad for parameter in self._parameters.values() if parameter.grad is not None]

    @property
    def updates(self) -> int:
        """Updates taken so far: AdamW's bias correction counts them."""
        return int(next(self._states())["step"])

    @updates.setter
    def updates(self, count: int) -> None:
        for state in self._states():
            state["step"].fill_(float(count))

    def moments(self) -> dict[str, Tensor]:
        """Both moments by "exp_avg/NAME" and "exp_avg_sq/NAME", sharded like the parameter.

        Before the first update they are made, as zeros, so that there is something to load into.
        """
        found: dict[str, Tensor] = {}
        for name, state in zip(self._parameters, self._states(), strict=True):
            found |= {f"{kind}/{name}": state[kind] for kind in ("exp_avg", "exp_avg_sq")}
        return found

    def _states(self) -> Iterator[dict[str, Tensor]]:
        for parameter in self._parameters.values():
            state: dict[str, Tensor] = self._adamw.state[parameter]
            if not state:
                # What AdamW's own first step would make; the fused kernel wants the count in the parameter's place.
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            yield state
