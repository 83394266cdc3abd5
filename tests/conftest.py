"""For all tests: how a run ends, and who shares a process."""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """SIGTERM ends the run as Ctrl-C does, so that fixtures stop their engines. Runs in the main
    thread, before anything is started."""
    signal.signal(signal.SIGTERM, lambda number, frame: pytest.exit("terminated", 128 + number))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `--dist loadgroup`: who shares engines runs in one process, one after the other."""
    for item in items:
        shares_fleet = "fleet" in getattr(item, "fixturenames", ())
        group = "fleet" if shares_fleet else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
