"""Switch: a CPU engine's worker is a fork of its engine process, as on GPUs.

On a CPU vLLM spawns the worker, because it binds the worker's threads to cores by environment
variables that are read once. Where it binds none (`nobind`, our default), a spawn only costs: 8 s
of a core at each start to import vLLM again, and the memory of the imports. The engine process
itself is still spawned: a Ray actor has threads and cannot be forked.
"""

from __future__ import annotations

import multiprocessing
import os

from disagg.engine.vllm_patches.patching import Patch

FORK_ENV = "DISAGG_FORK_WORKERS"
_METHOD_ENV, _BIND_ENV = "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND"


def is_asked_for() -> bool:
    """Whether the environment says so, in a process that vLLM started."""
    is_vllms = multiprocessing.parent_process() is not None
    return is_vllms and os.environ.get(FORK_ENV) == "1" and os.environ.get(_BIND_ENV) == "nobind"


def fork() -> None:
    """Have vLLM fork its workers."""
    os.environ[_METHOD_ENV] = "fork"


PATCH = Patch(
    "fork_workers",
    fault="each CPU engine imports vLLM once more at its start.",
    versions="",  # the variable is vLLM's own setting
    report="none: vLLM spawns on purpose, for engines that bind threads to cores",
    until="vLLM forks workers that bind no threads",
    apply=fork,
    when=is_asked_for,
)
