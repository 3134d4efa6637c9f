"""Linear layers with their weight kept in the CPU matmul's own order.

Given a plain weight, oneDNN rearranges it on every call; for the small matrices of a decoding step that costs as
much as the product. Keeping a rearranged copy halves the time of a linear layer and doubles its memory.
"""

from typing import Any

import torch


class PackedLinear:
    """Stands in for one `nn.Linear.forward`; holds the packed copy."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        self._bias = bias

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")
        return out


class PackedLinears:
    """The packed copies of a whole model. `pack` after every change of weights: a stale copy would still answer."""

    def __init__(self, model: Any) -> None:
        self._layers: list[torch.nn.Linear] = []
        if not torch._C._has_mkldnn or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return
        self._layers = [
            module
            for module in model.modules()
            if type(module) is torch.nn.Linear
            and module.weight.dtype == torch.bfloat16
            and module.weight.device.type == "cpu"
        ]

    def pack(self) -> None:
        """Copy every weight as it is now and compute with the copies from here on."""
        for layer in self._layers:
            layer.__dict__["forward"] = PackedLinear(layer.weight, layer.bias)

    def unpack(self) -> None:
        """Give the copies' memory back and compute with the weights themselves."""
        for layer in self._layers:
            layer.__dict__.pop("forward", None)
