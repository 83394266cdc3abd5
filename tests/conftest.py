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
    """Keep tests together that share engines, and leave generated tests out of the coverage.

    With `--dist loadgroup`, a group runs in one process: a module's tests, and all that use the
    fleet, which each process would else start for itself. The fleet's group is the longest, so it
    comes first. Coverage doubles the time of tests that hypothesis generates, and they cover little
    that the others do not.
    """
    shared = {item.path for item in items if _uses_fleet(item)}
    for item in items:
        group = "fleet" if item.path in shared else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
        if item.get_closest_marker("hypothesis"):
            item.add_marker(pytest.mark.no_cover)
    items.sort(key=lambda item: item.path not in shared)


def _uses_fleet(item: pytest.Item) -> bool:
    """Directly, or through the engines that its module names (tests/engine/conftest.py)."""
    module = getattr(item, "module", None)
    return "fleet" in getattr(item, "fixturenames", ()) or bool(getattr(module, "ENGINES", ()))


def pytest_collection_finish() -> None:
    """All test modules are imported."""
    gc.enable()
