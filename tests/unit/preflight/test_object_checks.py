"""What is wrong with `tiers.objects` is said before anything starts, and no store is asked."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from unit.preflight.deployments import deployment_with

from disagg.preflight import object_checks
from disagg.preflight.object_checks import object_problems, object_warnings


def problems(*, here: bool = True, **objects: Any) -> list[str]:
    made = deployment_with(tiers={"objects": {"url": "s3://bucket", **objects}})
    return [*object_problems(made, here=here)]


def test_what_is_sound_passes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("AWS_ACCESS_KEY_ID=a\n")
    file.chmod(0o600)
    assert problems(credentials_file=str(file)) == []


def test_files_that_are_missing_or_open_are_named(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.touch(mode=0o644)
    file.chmod(0o644)
    wrong: dict[str, Any] = {"credentials_file": str(file), "ca_file": str(tmp_path / "none")}
    first, second = problems(**wrong)
    assert first.startswith("tiers.objects.credentials_file: ")
    assert "mode 600" in first
    assert second.startswith("tiers.objects.ca_file: ")
    assert problems(here=False, **wrong) == []
    file.unlink()
    assert "No such file" in problems(**wrong)[0]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        object_checks, "find_spec", lambda name: None if name == "obstore" else found(name)
    )
    assert problems() == [
        "tiers.objects.url: s3 — obstore is not installed here; pip install 'disagg[s3]'"
    ]
    assert problems(url="valkey://host") == []


def test_objects_that_other_hosts_would_not_find_are_a_warning() -> None:
    def warnings(**sections: Any) -> list[str]:
        return [*object_warnings(deployment_with(**sections))]

    objects = {"url": "valkey://host"}
    (warning,) = warnings(tiers={"objects": objects})
    assert "set transfer.secret_file" in warning
    assert warnings(tiers={"objects": {**objects, "checksum": "fast"}}) == []
    assert warnings(tiers={"objects": objects}, transfer={"secret_env": "X"}) == []
    assert warnings() == []
