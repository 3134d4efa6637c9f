"""What a run works on: prompts encoded, split and checked, before any process starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from ullim.config.run import Recipe
from ullim.errors import BadInput
from ullim.records import Prompt
from ullim.signals.prompts import EncodedPrompt, encode_prompts, read_prompts


@dataclass(frozen=True, slots=True)
class Material:
    """What a run works on, read and checked before any process starts."""

    prompts: Sequence[EncodedPrompt]
    heldout: tuple[Prompt, ...]
    context: int  # tokens of prompt and answer together
    left_out: dict[str, int]  # reason -> prompts


def read_material(recipe: Recipe) -> Material:
    """Tokenizer, context and prompts; BadInput names what does not fit."""
    path = Path(recipe.policy.path)
    if not (path / "config.json").is_file():
        raise BadInput(f"policy.path: {path} is not a Hugging Face model folder (no config.json)")
    try:
        config = AutoConfig.from_pretrained(path)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise BadInput(f"policy.path: {path}: config or tokenizer cannot be loaded ({error})") from error
    if recipe.policy.chat_template is not None:
        tokenizer.chat_template = _template(Path(recipe.policy.chat_template))
    limit = {"max_tokens": recipe.prompts.max_tokens, "max_new_tokens": recipe.sampling.max_new_tokens}
    context = int(config.get_text_config().max_position_embeddings)
    encoded, left_out = encode_prompts(read_prompts(Path(recipe.prompts.path)), tokenizer, context=context, **limit)
    if recipe.prompts.heldout_path is not None:
        heldout, heldout_left_out = encode_prompts(
            read_prompts(Path(recipe.prompts.heldout_path)), tokenizer, context=context, **limit
        )
        left_out |= {f"held out, {reason}": count for reason, count in heldout_left_out.items()}
        heldout = heldout[: recipe.prompts.heldout]
    else:
        split = len(encoded) - recipe.prompts.heldout
        if split < 1:
            raise BadInput(
                f"prompts.heldout: {recipe.prompts.heldout} of {len(encoded)} usable prompts would leave none to train "
                f"on; write a smaller number"
            )
        encoded, heldout = encoded[:split], encoded[split:]
    longest = max(len(token_ids) for _, _, token_ids in [*encoded, *heldout])
    return Material(
        prompts=encoded,
        heldout=tuple(Prompt(name, place, messages, ids) for place, (name, messages, ids) in enumerate(heldout)),
        context=min(context, longest + recipe.sampling.max_new_tokens),
        left_out=left_out,
    )


def _template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"policy.chat_template: {path} cannot be read ({error}); name a Jinja file") from error
