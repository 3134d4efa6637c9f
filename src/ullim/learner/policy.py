"""The policy on the learner: a Hugging Face causal LM, packed rows in, log-probs of the completion tokens out.

Rank 0 reads the weights, the other ranks allocate without touching memory, and layer by layer the values are broadcast
and sharded, so that a host never holds more than one full copy and one full layer per further rank.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from ullim.errors import BadInput, RunFailed
from ullim.learner.attention import PACKED
from ullim.learner.packing import PackedBatch
from ullim.learner.ranks import Ranks
from ullim.learner.support import HeadScaling, check_config, head_scaling, probe, without_dropout
from ullim.objective.logprobs import token_logprobs


class Policy(nn.Module):
    """The causal LM with its head computed in chunks; what FSDP wraps as one unit.

    The head's product runs inside this forward because the head's weight is whole only there, tied or not.
    """

    def __init__(self, model: Any, head: HeadScaling, *, temperature: float, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self._head = head
        self._temperature = temperature
        self._chunk_tokens = chunk_tokens

    def forward(self, batch: PackedBatch, temperature: float | None = None) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy) of the batch's completion tokens, each float32 [N], at the sampling temperature."""
        hidden = self.model.base_model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False, packed=batch.layout
        ).last_hidden_state[0]
        output: nn.Linear = self.model.get_output_embeddings()
        return token_logprobs(
            hidden.index_select(0, batch.rows),
            output.weight,
            batch.targets,
            temperature=temperature or self._temperature,
            chunk_tokens=self._chunk_tokens,
            bias=None if output.bias is None else output.bias.detach(),
            logit_scale=self._head.scale,
            logit_softcap=self._head.softcap,
        )


class ShardedPolicy:
    """A policy sharded over the ranks, with the names under which its weights are published and saved.

    `parameters` are the shards by Hugging Face name, tied ones once. They are the optimiser's own tensors: stable until
    its next step, whatever forward or backward is running. `weights` are these and the buffers that checkpoints hold;
    `tied` maps further names to the one that carries the values.
    """

    def __init__(self, module: Policy, ranks: Ranks) -> None:
        self.module = module
        self.config = module.model.config
        self.parameters: dict[str, DTensor] = {
            name: _as_shard(name, parameter) for name, parameter in module.model.named_parameters()
        }
        self.tied, self.weights = (
            _tied_names(module.model),
            dict[str, Tensor](self.parameters) | _saved_buffers(module.model),
        )
        self._units = [m for m in module.modules() if isinstance(m, FSDPModule)]
        for unit in self._units:
            if ranks.world_size == 1:
                # One rank saves no memory by freeing whole weights, and would cast them again for every pass.
                unit.set_reshard_after_backward(False)
            else:
                # Gradients are summed, not averaged: losses are already divided by denominators of the whole update.
                unit.set_gradient_divide_factor(1.0)
                unit.set_force_sum_reduction_for_comms(True)

    @property
    def vocabulary(self) -> int:
        return int(self.module.model.get_input_embeddings().num_embeddings)

    @property
    def context(self) -> int:
        """Longest sequence in tokens that the model was built for."""
        return int(getattr(self.config.get_text_config(), "max_position_embeddings", None) or 2**31)

    def logprobs(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """(log-prob, entropy) per completion token [N]; a collective of all ranks."""
        logp, entropy = self.module(batch)
        return logp, entropy

    def forget_whole(self) -> None:
        """Drop whole weights that were kept, so that the next pass sees what the optimiser changed."""
        for unit in self._units:
            unit.reshard()


def load_policy(
    path: str,
    ranks: Ranks,
    *,
    compute_dtype: torch.dtype,
    temperature: float,
    chunk_tokens: int,
    gradient_checkpointing: bool = False,
    frozen: bool = False,
) -> ShardedPolicy:
    """Read a Hugging Face folder and shard it: float32 master weights, computed in `compute_dtype`.

    Args:
        path: a folder with config.json and safetensors.
        ranks: every one of them calls this.
        compute_dtype: dtype of forward and backward; gradients are reduced in float32.
        temperature: the logits are divided by it.
        chunk_tokens: tokens whose logits exist at once.
        gradient_checkpointing: recompute each layer in backward.
        frozen: no gradients, and weights kept in `compute_dtype` (the reference policy).

    Raises:
        BadInput: no such folder, or a model that the learner does not represent (see `support`).
        RunFailed: on the other ranks, where rank 0 could not load it.
    """
    config = _read_config(path)
    without_dropout(config)
    storage_dtype = compute_dtype if frozen else torch.float32
    status = torch.ones(1, device=ranks.device)
    try:
        if ranks.is_first:
            model = AutoModelForCausalLM.from_pretrained(
                path, config=config, dtype=storage_dtype, attn_implementation="eager", local_files_only=True
            )
            _check_names(model, path)
            module = _as_policy(model, temperature, chunk_tokens)
            if not frozen:
                _probe(module)
        else:
            with no_init_weights():
                model = AutoModelForCausalLM.from_config(config, dtype=storage_dtype)
            model.tie_weights()
            module = _as_policy(model, temperature, chunk_tokens)
    except BaseException:
        ranks.from_first(status.zero_())
        raise
    if not bool(ranks.from_first(status).item()):
        raise RunFailed(f"learner rank 0 could not load {path}; its own error says why")
    model.set_attn_implementation(PACKED)
    model.train()
    model.requires_grad_(not frozen)
    if gradient_checkpointing and not frozen:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    _shard(module, ranks, compute_dtype)
    return ShardedPolicy(module, ranks)


def _read_config(path: str) -> Any:
    if not (Path(path) / "config.json").is_file():
        raise BadInput(f"policy.path: {path} has no config.json; give a Hugging Face causal LM folder")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (ValueError, KeyError, OSError, json.JSONDecodeError) as error:
        raise BadInput(f"policy.path: {path}/config.json cannot be read: {error}") from error
    check_config(config, path)
    return config


def _check_names(model: Any, path: str) -> None:
    """Weights are published and saved under the module's names, so these must be those of the folder."""
    if getattr(model, "_weight_conversions", None):
        raise BadInput(
            f"policy.path: transformers renames or merges the weights of {path} while loading; engines and checkpoints "
            "would get names that they do not know"
        )


def _as_policy(model: Any, temperature: float, chunk_tokens: int) -> Policy:
    if model.get_output_embeddings() is None:
        raise BadInput(f"policy.path: {type(model).__name__} has no output head; a causal LM is needed")
    return Policy(model, head_scaling(model.config), temperature=temperature, chunk_tokens=chunk_tokens)


@torch.no_grad()
def _probe(module: Policy) -> None:
    model = module.model.eval()

    def packed(batch: PackedBatch) -> Tensor:
        model.set_attn_implementation(PACKED)
        logp: Tensor = module(batch, temperature=1.0)[0]
        return logp

    def own(ids: Tensor) -> Tensor:
        model.set_attn_implementation("eager")
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
        return logits

    probe(packed, own, int(model.get_input_embeddings().num_embeddings))


def _shard(module: Policy, ranks: Ranks, compute_dtype: torch.dtype) -> None:
    """Give every rank rank 0's values and keep only its shard of them, one unit after another."""
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layer_kinds = set(getattr(module.model, "_no_split_modules", None) or ())
    for unit in [*(m for m in module.modules() if type(m).__name__ in layer_kinds), module]:
        for tensor in (*unit.parameters(), *unit.buffers()):
            if not isinstance(tensor, DTensor):
                staged = tensor.data.to(ranks.device)  # NCCL carries device memory only
                tensor.data.copy_(ranks.from_first(staged))
        # One rank alone keeps its whole weights from the first pass of an update to the last.
        fully_shard(unit, mesh=ranks.mesh, mp_policy=precision, reshard_after_forward=ranks.world_size > 1)


def _as_shard(name: str, parameter: nn.Parameter) -> DTensor:
    if not isinstance(parameter, DTensor):
        raise TypeError(f"parameter {name} was not sharded")
    return parameter


def _tied_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    pairs = ((name, first.setdefault(id(p), name)) for name, p in model.named_parameters(remove_duplicate=False))
    return {name: known for name, known in pairs if name != known}


def _saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    saved = model.state_dict(keep_vars=True).keys()  # only this tells which buffers a checkpoint holds
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}
