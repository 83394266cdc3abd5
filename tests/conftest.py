"""For all tests: SIGTERM ends the run as Ctrl-C does, so that fixtures stop their engines."""

from __future__ import annotations

import signal

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Runs in the main thread, before anything is started."""
    signal.signal(signal.SIGTERM, lambda number, frame: pytest.exit("terminated", 128 + number))
