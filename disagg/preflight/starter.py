"""The file that `disagg init` writes, and the deployment of `disagg serve MODEL`: what suits this
machine, from the GPUs, cores and memory that it has."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from disagg.config import absolute, is_local
from disagg.errors import ConfigError
from disagg.preflight.argument_keys import ROLES
from disagg.preflight.gpu_memory import gpus
from disagg.preflight.memory_checks import machine_bytes

_GIB = 1 << 30
_MOST_KV_GIB = 8


@dataclass(frozen=True)
class Machine:
    """What engines can use. memory: bytes of the host. gpus: bytes of each GPU."""

    cores: int
    memory: int
    gpus: tuple[int, ...]

    @staticmethod
    def here() -> Machine:
        """This one."""
        cores = len(os.sched_getaffinity(0))
        return Machine(cores, machine_bytes(), tuple(gpus()))

    def __str__(self) -> str:
        has = f"{self.cores} cores, {self.memory / _GIB:.0f} GiB"
        if not self.gpus:
            return f"{has}, no GPU"
        most = max(self.gpus) / _GIB
        return f"{has}, {len(self.gpus)} GPU{'s' * (len(self.gpus) > 1)} of {most:.0f} GiB"


def deployment(
    model: str, machine: Machine, *, prefill: int = 1, decode: int = 1, port: int = 8000
) -> dict[str, Any]:
    """A file's content: this model on this machine, with so many engines. The deployment is named
    after the model."""
    engines = prefill + decode
    content: dict[str, Any] = {"name": _name(model), "model": {"path": model}}
    content["model"]["served_name"] = Path(model).name
    pools: dict[str, dict[str, Any]] = {
        "prefill": {"replicas": prefill},
        "decode": {"replicas": decode},
    }
    if machine.gpus:
        share = min(1.0, len(machine.gpus) / engines)
        if share < 1:
            # Engines that share a GPU share its memory; the rest is for the driver and transfers.
            share = 1 / -(-engines // len(machine.gpus))
            content["engine"] = {"args": {"gpu_memory_utilization": round(0.9 * share, 2)}}
        for role in ROLES:
            pools[role]["resources"] = {"num_gpus": int(share) if share == 1 else round(share, 3)}
    else:
        content["engine"] = _cpu_engine(model, machine, engines)
    return {**content, **pools, "router": {"host": "127.0.0.1", "port": port}}


def _cpu_engine(model: str, machine: Machine, engines: int) -> dict[str, Any]:
    # A third of the memory for KV: the rest is for weights, of which each engine has its own.
    space = min(_MOST_KV_GIB, max(1, machine.memory // _GIB // 3 // engines))
    env: dict[str, Any] = {"VLLM_CPU_KVCACHE_SPACE": space}
    if machine.cores < 4 * engines:
        env |= {
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": max(1, machine.cores // engines),
        }
    if is_local(model):
        env["HF_HUB_OFFLINE"] = 1
    args = {"dtype": "float32", "block_size": 128, "enforce_eager": True}
    return {"args": args, "env": env}


def is_missing(model: str) -> bool:
    """Whether this is a folder that is not there."""
    return is_local(model) and not absolute(Path(model)).is_dir()


def _name(model: str) -> str:
    """A deployment's name: the model's, in the letters that names may have."""
    text = "".join(c if c.isalnum() and c.isascii() else "-" for c in Path(model).name.lower())
    return text.strip("-")[:40].strip("-") or "disagg"


_WORDS = {
    "name": "for `disagg stop`, `logs`, `status`",
    "path": "a checkpoint's folder, or a name on the Hugging Face hub",
    "served_name": "the name that requests use",
    "engine": "for both pools; a pool's own args and env win",
    "args": "vLLM's engine arguments, by vLLM's names",
    "dtype": "answers equal a single engine's, token for token; bfloat16 is faster",
    "block_size": "on CPU a multiple of 32",
    "enforce_eager": "starts without compiling",
    "env": "variables of the engines",
    "VLLM_CPU_KVCACHE_SPACE": "GiB of KV cache of each engine",
    "VLLM_CPU_OMP_THREADS_BIND": "engines share the cores",
    "HF_HUB_OFFLINE": "the checkpoint is here; remove it to load one by its hub name",
    "gpu_memory_utilization": "of the GPU's memory; engines share it",
    "replicas": "engines; `disagg scale` changes the number",
    "num_gpus": "of each engine",
    "host": "0.0.0.0 serves other machines; then name keys: api_keys_env: DISAGG_API_KEYS",
    "port": "of the OpenAI API; 0 takes any free one",
}


def written(content: dict[str, Any], machine: Machine) -> str:
    """The content as a commented file."""
    lines = [
        f"# A deployment of disagg for this machine: {machine}.",
        "#",
        "#   disagg check FILE    what would run, and whether it can",
        "#   disagg serve FILE    until Ctrl-C",
        "#",
        "# All keys: docs/deployment.md, or `disagg schema` for an editor.",
    ]
    for line in yaml.safe_dump(content, sort_keys=False).splitlines():
        key = line.partition(":")[0].strip()
        if line and not line.startswith(" ") and key != "name":
            lines.append("")
        lines.append(f"{line} # {_WORDS[key]}" if key in _WORDS else line)
    return "\n".join(lines) + "\n"


def write(path: Path, model: str, machine: Machine, *, replace: bool) -> None:
    """Write a file for this model. Raises ConfigError if there is one and `replace` is not set."""
    text = written(deployment(model, machine), machine)
    try:
        with path.open("w" if replace else "x") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path}: exists; name another file, or replace it by --force") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be written ({error.strerror})") from error
