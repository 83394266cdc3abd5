"""For all tests.

SIGTERM ends the run as Ctrl-C does, so that fixtures stop their engines. Python imports the test
modules without garbage collection, which takes a fifth less time. `pytest -n N --dist loadgroup`
runs each module in one process, and all modules that use the session's engines in the same one.
"""

from __future__ import annotations

import gc
import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Runs in the main thread, before anything is started."""
    gc.disable()
    signal.signal(signal.SIGTERM, lambda number, frame: pytest.exit("terminated", 128 + number))


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests for xdist. The longest group, that of the session's engines, comes first."""
    shared = {item.path for item in items if "fleet" in getattr(item, "fixturenames", ())}
    for item in items:
        name = "fleet" if item.path in shared else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: item.path not in shared)


def pytest_collection_finish() -> None:
    """All test modules are imported."""
    gc.enable()
