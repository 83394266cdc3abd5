"""What `kv_connector_extra_config` may say."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from disagg.connector.hidden_states.settings import read_settings
from disagg.errors import ConfigError


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_default_folder_is_this_users_own(temporary: Path) -> None:
    folder = read_settings({}).folder().make("path").path
    assert folder == temporary / f"disagg-{os.getuid()}" / "hidden-states"
    assert folder.parent.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700


def test_a_default_folder_that_others_made_is_refused(temporary: Path) -> None:
    theirs = temporary / f"disagg-{os.getuid()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    with pytest.raises(ConfigError, match=r"shared_storage_path: .* has mode 777"):
        read_settings({}).folder().make("shared_storage_path")


def test_a_relative_folder_becomes_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_settings({"shared_storage_path": "x"}).folder().path == tmp_path / "x"


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({"shared_storage_pth": "/x"}, "shared_storage_pth: '/x'.*keys: shared_storage_path, num"),
        ({"num_writer_threads": 0}, "num_writer_threads: 0 — .*greater than or equal to 1"),
        ({"use_synchronization_lock": False}, "use_synchronization_lock.*remove it"),
        ({"allow_custom_save_path": True}, "allow_custom_save_path.*remove it"),
    ],
)
def test_wrong_keys_are_refused_by_name(extra: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_settings(extra)
