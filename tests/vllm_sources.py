"""The Python sources of a vLLM: installed, in a wheel or a source archive, or on PyPI."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from disagg.vllm_compat import versions


@dataclass(frozen=True)
class Source:
    """root: the folder that holds `vllm/` and, out of a wheel, its metadata."""

    version: str
    root: Path


def installed_source() -> Source:
    """Of the vLLM of this environment. Raises `SystemExit` if there is none."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        raise SystemExit("no vLLM is installed here: make install")
    return Source(versions.installed(), Path(found.origin).parents[1])


@contextmanager
def opened(name: str | None) -> Iterator[Source]:
    """name: a version on PyPI, the path of a wheel, an archive or a folder; None: the installed.

    Raises `SystemExit` with one line if there is nothing of this name.
    """
    if name is None:
        yield installed_source()
        return
    path = Path(name)
    if path.is_dir():
        yield Source(_version_of(path) or "0", path)
        return
    with TemporaryDirectory(prefix="vllm-source-") as folder:
        file = path if path.is_file() else downloaded(name, Path(folder))
        yield unpacked(file, Path(folder) / "unpacked")


def downloaded(version: str, folder: Path) -> Path:
    """The wheel of a version for CPU, or else of the one for GPUs."""
    for distribution in reversed(versions.DISTRIBUTIONS):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", str(folder), f"{distribution}=={version}"]
        if subprocess.run(command, capture_output=True, timeout=900, check=False).returncode == 0:
            return next(folder.glob("vllm*"))
    raise SystemExit(f"vLLM {version}: no such wheel, archive or folder, and not on PyPI either")


def unpacked(file: Path, folder: Path) -> Source:
    """The Python files and the metadata of a wheel or a source archive."""
    wanted = re.compile(r"(^|/)vllm/.*\.py$|\.dist-info/[^/]+$|/PKG-INFO$")
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if wanted.search(name)]
            archive.extractall(folder, names)
        return Source(file.name.split("-")[1], folder)
    with tarfile.open(file) as archive:
        members = [one for one in archive.getmembers() if wanted.search(one.name)]
        archive.extractall(folder, members, filter="data")
    (root,) = folder.iterdir()
    return Source(root.name.rpartition("-")[2], root)


def _version_of(root: Path) -> str | None:
    names = [found.name for found in root.glob("vllm*.dist-info")]
    return names[0].removesuffix(".dist-info").partition("-")[2] if names else None
