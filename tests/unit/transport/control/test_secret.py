from __future__ import annotations

import os
import stat
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from disagg.errors import ConfigError
from disagg.transport.control import secret
from disagg.transport.control.secret import SECRET_VARIABLE, read_secret, secret_for


@pytest.fixture(autouse=True)
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the user's secret is kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    return tmp_path / f"disagg-{os.getuid()}" / "secret"


@pytest.mark.parametrize("configured", ["", " ", "short", "15 characters..", " " * 40])
def test_a_short_or_blank_secret_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, configured: str
) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, configured)
    with pytest.raises(ConfigError, match=r"DISAGG_SECRET: .* needs at least 16") as refused:
        read_secret()
    assert not configured.strip() or configured.strip() not in str(refused.value)


def test_the_configured_one_is_used(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, " 0123456789abcdef\n")
    assert read_secret() == b"0123456789abcdef"
    assert not file.exists()


def test_engines_that_start_at_once_share_one(file: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: read_secret(), range(8)))
    assert len(found) == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["secret"]


@pytest.mark.parametrize("mode", [0o644, 0o660, 0o602])
def test_a_file_that_others_may_read_or_change_is_refused(file: Path, mode: int) -> None:
    read_secret()
    file.chmod(mode)
    with pytest.raises(
        ConfigError, match=f"secret: .* has mode {mode:o}: other users .* remove it"
    ):
        read_secret()


def test_an_empty_file_or_a_fifo_is_refused_at_once(file: Path) -> None:
    read_secret()
    file.write_text("")
    with pytest.raises(ConfigError, match="needs at least 16"):
        read_secret()
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(ConfigError, match="is not a regular file"):
        read_secret()


def test_a_key_of_one_purpose_is_not_that_of_another() -> None:
    assert secret_for(b"one", b"secret") != secret_for(b"other", b"secret")
    assert secret_for(b"one", b"secret") != secret_for(b"one", b"Secret")
    assert secret.MIN_LENGTH == 16
