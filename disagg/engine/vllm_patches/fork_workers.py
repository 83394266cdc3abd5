"""Lets a CPU engine's worker be a fork of its engine process, as on GPUs.

vLLM spawns it on CPUs, because it binds the worker's threads to cores by environment variables that
are read once. Where it binds none (`nobind`, our default) that is 8 s of a core for importing vLLM
again, at each start, and the memory of what was imported. The engine process itself is spawned
still: an actor of Ray's has threads, and cannot be forked.
"""

from __future__ import annotations

import multiprocessing
import os

FORK_ENV = "DISAGG_FORK_WORKERS"
_METHOD_ENV, _BIND_ENV = "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_CPU_OMP_THREADS_BIND"


def install() -> None:
    """In vLLM's own processes, if the environment says so."""
    is_vllms = multiprocessing.parent_process() is not None
    if is_vllms and os.environ.get(FORK_ENV) == "1" and os.environ.get(_BIND_ENV) == "nobind":
        os.environ[_METHOD_ENV] = "fork"
