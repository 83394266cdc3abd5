"""Text of peers and clients stays on one line of the log, and their lines are bounded."""

from __future__ import annotations

import logging

import pytest

from disagg import safe_logging
from disagg.safe_logging import LimitedLog, LimitedWarnings, foreign

logger = logging.getLogger("disagg.test")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("cmpl-1/2 é 日本", "cmpl-1/2 é 日本"),
        ("", ""),
        ("a\nWARNING forged\r\n", "a\\nWARNING forged\\r\\n"),
        ("\x1b[2J\x1b]0;x\x07", "\\x1b[2J\\x1b]0;x\\x07"),
        ("abc\u202edef\u2066\u200f", "abc\\u202edef\\u2066\\u200f"),
        ("line\u2028and\u2029and\x85", "line\\u2028and\\u2029and\\x85"),
        ("\ud800 \x00 \ufeff", "\\ud800 \\x00 \\ufeff"),
        ("\\n is not a line end", "\\n is not a line end"),
    ],
)
def test_foreign_text(text: str, shown: str) -> None:
    assert foreign(text) == shown
    assert foreign(ValueError(text)) == foreign(shown) == shown
    assert shown.isprintable()


def test_foreign_text_is_short() -> None:
    assert foreign("x" * 200) == "x" * 200
    assert foreign("\n" * 10_000, 3) == "\\n\\n\\n... (10000 characters)"
    assert len(foreign("\U000e0001" * 10_000)) < 2100


def test_a_limited_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("disagg.safe_logging.time.monotonic", lambda: now)
    log = LimitedLog(logger, 3)
    for number in range(50):
        log.warning("line %d", number)
    assert caplog.messages == ["line 0", "line 1", "line 2"]
    caplog.clear()
    now += 61
    log.warning("later")
    assert caplog.messages == ["suppressed 47 similar lines in the last minutes", "later"]
    caplog.clear()
    now += 61
    try:
        raise ValueError("x")
    except ValueError:
        log.exception("failed")
    assert caplog.messages == ["failed"]
    assert caplog.records[0].exc_info


def test_another_librarys_warnings_are_limited_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def record(level: int) -> logging.LogRecord:
        return logging.LogRecord("x", level, "", 0, "Invalid HTTP request %s.", ("here",), None)

    few = LimitedWarnings()
    assert [few.filter(record(logging.WARNING)) for _ in range(30)].count(True) == 10
    assert few.filter(record(logging.ERROR))
    monkeypatch.setattr(safe_logging, "_WINDOW_S", 0.0)
    shown = record(logging.WARNING)
    assert few.filter(shown)
    assert shown.getMessage().startswith("Invalid HTTP request here. (suppressed 20 similar lines")
