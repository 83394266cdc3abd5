"""A process that has imported vLLM: servers of tests and of `disagg bench faults` are its forks.

Started as users start it, an engine is three processes that spend 8 s of a core each on imports.
What is imported once here is also in memory once. Reads a line of JSON for each server from its
standard input ({"args", "env", "log"}), answers its process id, and ends all of them with itself.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
from typing import Any

import setproctitle

MODULES = (
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen3",
    "compressed_tensors",  # as a model loads; it imports torch's compiler, 3 s of a core
    "disagg.connector.handoff.connector",
    "disagg.connector.offload.connector",
)


def main() -> None:
    """Until standard input ends."""
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    # An engine collects garbage twice as it starts. Without what is imported here, that is quick.
    gc.freeze()
    gc.enable()
    setproctitle.getproctitle()  # it looks for the title's place, which the environment moves
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies: who asked for them watches them
    started = []
    for line in sys.stdin:
        asked = json.loads(line)
        pid = os.fork()
        if pid == 0:
            serve(asked)
            return
        started.append(pid)
        print(pid, flush=True)
    for pid in started:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    os._exit(0)  # Triton's bindings print a page about themselves as Python ends


def serve(asked: dict[str, Any]) -> None:
    """Become the server. Its own processes are forks as well, where vLLM would spawn them."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(asked["env"])
    tempfile.tempdir = None
    sys.argv = ["api_server", *asked["args"]]
    context = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context(  # type: ignore[assignment]
        "fork" if method == "spawn" else method
    )
    importlib.import_module("vllm.entrypoints.launchers.api_server.entry").main()


if __name__ == "__main__":
    main()
