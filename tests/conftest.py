"""For all tests.

SIGTERM ends the run as Ctrl-C does, so that fixtures stop their engines. Python imports the test
modules without garbage collection, which takes a fifth less time. A busy machine fails no generated
test. `pytest -n N --dist loadgroup` runs each module in one process, and all modules that use the
session's engines in the same one.
"""

from __future__ import annotations

import functools
import gc
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("busy")

# Directly, or through the engines that the module names (tests/engine/conftest.py).
_USES_FLEET = re.compile(r"^ENGINES =|\bfleet: Fleet\b", re.MULTILINE)


def pytest_configure(config: pytest.Config) -> None:
    """Runs in the main thread, before anything is started."""
    gc.disable()
    signal.signal(signal.SIGTERM, lambda number, frame: pytest.exit("terminated", 128 + number))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run what takes longest first, so that two processes end together: the tests that share the
    fleet, then those of clusters. Leave generated tests out of the coverage: it doubles their time,
    and they cover little that the others do not."""
    for item in items:
        if item.get_closest_marker("hypothesis"):
            item.add_marker(pytest.mark.no_cover)
    items.sort(key=lambda item: (not _uses_fleet(item.path), "cluster" not in item.path.parts))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A scheduler that keeps the tests of a group in one process. xdist's own does not with pytest
    9.2, which ignores the group's name at the end of a test's id."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

    class ByModule(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return "fleet" if _uses_fleet(config.rootpath / module) else module

    return ByModule(config, log)


@functools.cache
def _uses_fleet(module: Path) -> bool:
    return _USES_FLEET.search(module.read_text()) is not None


def pytest_collection_finish() -> None:
    """All test modules are imported."""
    gc.enable()
