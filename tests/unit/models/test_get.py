"""`disagg get-model` around its download: what is there is checked, what is not is never half
there."""

from __future__ import annotations

import json
from pathlib import Path

import blake3
import pytest
from rich.console import Console

from disagg.errors import ConfigError
from disagg.models.catalogue import MODELS, SMOLLM2
from disagg.models.download import INDEX_VARIABLES, DownloadError
from disagg.models.get import MARK, get_model

QUIET = Console(quiet=True)


@pytest.fixture
def there(tmp_path: Path) -> Path:
    """What an earlier call wrote."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    mark = {
        "from": {"sha256": SMOLLM2.sha256},
        "blake3": {"config.json": blake3.blake3(b"{}").hexdigest()},
    }
    (folder / MARK).write_text(json.dumps(mark))
    return folder


def test_what_is_there_is_taken(there: Path) -> None:
    assert get_model(SMOLLM2.name, there, QUIET) == there


def test_damage_is_found(there: Path) -> None:
    (there / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"config\.json: damaged or missing; remove"):
        get_model(SMOLLM2.name, there, QUIET)
    (there / "config.json").unlink()
    with pytest.raises(ConfigError, match="damaged or missing"):
        get_model(SMOLLM2.name, there, QUIET)


def test_another_folder_is_never_touched(there: Path) -> None:
    mark = json.loads((there / MARK).read_text())
    (there / MARK).write_text(json.dumps(mark | {"from": {"sha256": "0"}}))
    with pytest.raises(ConfigError, match="holds another model"):
        get_model(SMOLLM2.name, there, QUIET)
    (there / MARK).write_text("{")
    with pytest.raises(ConfigError, match="was not made by disagg get-model"):
        get_model(SMOLLM2.name, there, QUIET)
    assert (there / "config.json").read_text() == "{}"


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=f"no such model; there are: {', '.join(MODELS)}"):
        get_model("gpt-9", None, QUIET)


def test_without_a_network_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv(INDEX_VARIABLES[0], "http://127.0.0.1:9/simple")
    with pytest.raises(DownloadError, match="check the network"):
        get_model(SMOLLM2.name, tmp_path / "model", QUIET)
    assert list(tmp_path.iterdir()) == []
