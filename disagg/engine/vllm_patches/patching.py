"""When a CPU engine's worker is mended: what is mended costs other processes a second to import."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def in_cpu_workers(mend: Callable[[], None]) -> None:
    """Have `mend` called before a worker starts, in each process that may become a CPU engine's."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    WorkerWrapperBase.init_device = before(WorkerWrapperBase.init_device, mend)  # type: ignore[method-assign]


def before(init: Callable[[Any], None], mend: Callable[[], None]) -> Callable[[Any], None]:
    """vLLM's start of a worker, behind `mend`."""
    mends: tuple[Callable[[], None], ...] = getattr(init, "is_behind", ())
    if mend in mends:
        return init  # plugins may be loaded twice

    @functools.wraps(init)
    def is_behind(worker: Any) -> None:
        mend()
        init(worker)

    is_behind.is_behind = (*mends, mend)  # type: ignore[attr-defined]
    return is_behind
