"""The source of one version of vLLM: modules, the names in them, classes with their members.

Read from files, never imported: any version can be read beside the installed one, without CUDA.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
_MOST_HOPS = 8  # re-exports, base classes


@dataclass(frozen=True)
class Found:
    """What a name stands for, and the module that defines it. node: None for a module."""

    module: Module
    node: ast.AST | None


class Module:
    """One file, parsed when it is first asked for."""

    def __init__(self, tree: Tree, name: str, path: Path) -> None:
        self.tree, self.name, self.path = tree, name, path

    @cached_property
    def body(self) -> list[ast.stmt]:
        return ast.parse(self.path.read_text(encoding="utf-8")).body

    @cached_property
    def names(self) -> dict[str, ast.AST]:
        """Names of the module's top level; the first definition, as imports may be repeated."""
        found: dict[str, ast.AST] = {}
        for statement in _flat(self.body):
            for name, node in _defined(statement):
                if name not in found or isinstance(found[name], ast.Import | ast.ImportFrom):
                    found[name] = node
        return found

    @cached_property
    def stars(self) -> list[str]:
        """Modules of which all names are imported."""
        imports = (one for one in _flat(self.body) if isinstance(one, ast.ImportFrom))
        return [self.absolute(one) for one in imports if one.names[0].name == "*"]

    @cached_property
    def lazy(self) -> dict[str, str]:
        """Names that `__getattr__` imports when they are asked for: name -> module, of a top-level
        dictionary of strings such as `"LLM": ".entrypoints.llm:LLM"`."""
        found: dict[str, str] = {}
        for node in ast.walk(ast.Module(self.body, [])) if "__getattr__" in self.names else ():
            if isinstance(node, ast.Dict):
                for key, value in zip(node.keys, node.values, strict=True):
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                        found[str(key.value)] = str(value.value)
        return found

    def absolute(self, statement: ast.ImportFrom) -> str:
        """The full name of the module that a `from` names."""
        if not statement.level:
            return statement.module or ""
        parts = self.name.split(".")
        is_package = self.path.name == "__init__.py"
        base = parts[: len(parts) - statement.level + is_package]
        return ".".join([*base, *([statement.module] if statement.module else [])])

    def find(self, name: str, hops: int = _MOST_HOPS) -> Found | None:
        """Where a name of this module is defined, here or in a module that this one imports."""
        if not hops:
            return None
        node = self.names.get(name)
        match node:
            case ast.ImportFrom():
                return self._imported(node, name, hops)
            case ast.AST():
                return Found(self, node)
        if self.path.name == "__init__.py" and (inner := self.tree.module(f"{self.name}.{name}")):
            return Found(inner, None)
        if name in self.lazy:
            module = self.lazy[name].partition(":")[0]
            other = self.tree.module(f"{self.name}{module}" if module[:1] == "." else module)
            return other.find(name, hops - 1) if other else Found(self, None)
        others = (self.tree.module(star) for star in self.stars)
        return next(filter(None, (one.find(name, hops - 1) for one in others if one)), None)

    def _imported(self, statement: ast.ImportFrom, name: str, hops: int) -> Found | None:
        source = next(a.name for a in statement.names if (a.asname or a.name) == name)
        module = self.absolute(statement)
        if not module.startswith("vllm"):
            return Found(self, statement)
        if (inner := self.tree.module(f"{module}.{source}")) is not None:
            return Found(inner, None)
        other = self.tree.module(module)
        return other.find(source, hops - 1) if other else None


class Tree:
    """All of one vLLM. root: the folder that holds `vllm/`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}

    def module(self, name: str) -> Module | None:
        if name not in self._modules:
            path = self.root.joinpath(*name.split("."))
            files = (path.with_suffix(".py"), path / "__init__.py")
            file = next((file for file in files if file.is_file()), None)
            self._modules[name] = Module(self, name, file) if file else None
        return self._modules[name]

    def find(self, module: str, name: str) -> Found | None:
        """What `from module import name` gives; None if nothing."""
        source = self.module(module)
        return source.find(name) if source else None

    def member(self, found: Found, name: str, hops: int = _MOST_HOPS) -> Found | None:
        """A method, field or attribute of a class, its own or inherited."""
        if not hops or not isinstance(found.node, ast.ClassDef):
            return None
        for node_name, node in _members(found.node):
            if node_name == name:
                return Found(found.module, node)
        for base in self.bases(found):
            if inherited := self.member(base, name, hops - 1):
                return inherited
        return None

    def bases(self, found: Found) -> Iterator[Found]:
        """The base classes that are vLLM's."""
        assert isinstance(found.node, ast.ClassDef)
        for base in found.node.bases:
            head = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(head, ast.Name) and (above := found.module.find(head.id)):
                if isinstance(above.node, ast.ClassDef):
                    yield above

    def is_closed(self, found: Found, hops: int = _MOST_HOPS) -> bool:
        """Whether all bases of a class are known here, so that a missing member is missing."""
        if not isinstance(found.node, ast.ClassDef) or not hops:
            return False
        if any(name == "__getattr__" for name, _ in _members(found.node)):
            return False
        bases = [b.value if isinstance(b, ast.Subscript) else b for b in found.node.bases]
        plain = {"object", "ABC", "Generic", "Protocol"}
        ours = [b for b in bases if not (isinstance(b, ast.Name) and b.id in plain)]
        known = list(self.bases(found))
        return len(known) == len(ours) and all(self.is_closed(b, hops - 1) for b in known)

    def type_of(self, member: Found) -> Found | None:
        """The class that a field, a property or a method returns, if its annotation is plain."""
        match member.node:
            case ast.AnnAssign(annotation=annotation):
                return self.annotated(member.module, annotation)
            case ast.FunctionDef(decorator_list=decorators, returns=ast.expr() as returns):
                names = {getattr(d, "id", getattr(d, "attr", "")) for d in decorators}
                return self.annotated(member.module, returns) if "property" in names else None
        return None

    def annotated(self, module: Module, node: ast.expr) -> Found | None:
        """The class of an annotation: a name, a text of one, or `X | None`."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            left, right = node.left, node.right
            none = isinstance(right, ast.Constant) and right.value is None
            return self.annotated(module, left) if none else None
        found = module.find(node.id) if isinstance(node, ast.Name) else None
        return found if found and isinstance(found.node, ast.ClassDef) else None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at the top level, and those under `if` and `try` there."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _flat(statement.body)
            yield from _flat(getattr(statement, "orelse", []))
            for handler in getattr(statement, "handlers", []):
                yield from _flat(handler.body)


def _defined(statement: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    match statement:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            yield name, statement
        case ast.Assign(targets=targets):
            for target in targets:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name):
                        yield node.id, statement
        case ast.AnnAssign(target=ast.Name(id=name)):
            yield name, statement
        case ast.ImportFrom(names=names) | ast.Import(names=names):
            for alias in names:
                yield alias.asname or alias.name.split(".")[0], statement


def _members(node: ast.ClassDef) -> Iterator[tuple[str, ast.AST]]:
    """Of the class's own body, then what its methods assign to `self`."""
    for statement in _flat(node.body):
        yield from _defined(statement)
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign | ast.AnnAssign):
            targets = inner.targets if isinstance(inner, ast.Assign) else [inner.target]
            for target in (leaf for one in targets for leaf in ast.walk(one)):
                if isinstance(target, ast.Attribute) and getattr(target.value, "id", "") == "self":
                    yield target.attr, inner
