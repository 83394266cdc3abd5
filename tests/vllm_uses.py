"""All that our code uses of vLLM's, read from the code: nothing here is listed by hand.

Names that are imported; how imported functions are called; methods that our classes override; and
attributes of variables whose annotation is a class of vLLM's. A use under `if NAME.here` of a
difference in `disagg/vllm_compat` is a use in these versions alone.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Conditions = frozenset[tuple[str, bool]]
"""Names of differences, and whether a version must have them."""


@dataclass(frozen=True)
class Use:
    """One use. kind: name, attribute, call, override or file.

    module, name: of an import, or of the class; a file's path and the name in it. chain: attributes
    from there. positional, keywords: of a call; of an override, how many arguments it takes at
    least and at most (None: any), and its keywords.
    """

    kind: str
    where: str
    module: str
    name: str
    chain: tuple[str, ...] = ()
    positional: int = 0
    most: int | None = None
    keywords: tuple[str, ...] = ()
    is_open: bool = False
    """A call with `*` or `**`, an override that takes any keyword."""
    conditions: Conditions = frozenset()

    def __str__(self) -> str:
        path = ".".join((self.name, *self.chain)).strip(".")
        return f"{self.module}{':' if self.kind == 'file' else '.'}{path}"


def uses_of(package: Path) -> list[Use]:
    """All uses in the Python files of a folder."""
    files = {file: ast.parse(file.read_text()) for file in sorted(package.rglob("*.py"))}
    readers = [_File(file.relative_to(package.parent), tree) for file, tree in files.items()]
    bases = {name: found for reader in readers for name, found in reader.our_bases()}
    found = [use for reader in readers for use in reader.uses(bases)]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class _Bound:
    """A name's class or function: vLLM's module and name, then attributes of that; `[]` stands for
    the elements of a list."""

    module: str
    name: str
    chain: tuple[str, ...] = ()


_Names = dict[str, _Bound]


class _File:
    """Reads one file: its imports first, then every statement under its conditions."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path, self.tree = path, tree
        self.narrowed: set[str] = set()
        self.imported: dict[str, list[_Bound]] = {}
        self.conditions: dict[tuple[str, str], Conditions] = {}
        self.found: list[Use] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and _is_vllms(node.module):
                for alias in node.names:
                    bound = _Bound(node.module or "", alias.name)
                    known = self.imported.setdefault(alias.asname or alias.name, [])
                    known += [bound] if bound not in known else []

    def our_bases(self) -> Iterator[tuple[str, list[str | _Bound]]]:
        """Each class of the file, with its bases: names of ours, or what vLLM's they are."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                heads = [b.value if isinstance(b, ast.Subscript) else b for b in node.bases]
                names = [head.id for head in heads if isinstance(head, ast.Name)]
                yield node.name, [self.imported.get(name, [name])[0] for name in names]

    def uses(self, bases: dict[str, list[str | _Bound]]) -> list[Use]:
        self.bases = bases
        self._body(self.tree.body, frozenset(), {})
        return self.found

    def _add(
        self, kind: str, node: ast.AST, bound: _Bound, when: Conditions, **more: object
    ) -> None:
        where = f"{self.path}:{getattr(node, 'lineno', 1)}"
        when |= self.conditions.get((bound.module, bound.name), frozenset())
        use = Use(kind, where, bound.module, bound.name, bound.chain, conditions=when, **more)  # type: ignore[arg-type]
        self.found.append(use)

    # ---- statements ------------------------------------------------------------------------

    def _body(self, body: Sequence[ast.stmt], when: Conditions, names: _Names) -> None:
        for statement in body:
            self._statement(statement, when, names)
            condition = _condition(statement.test) if isinstance(statement, ast.If) else None
            if condition and isinstance(statement, ast.If):
                if isinstance(statement.body[-1], ast.Return | ast.Raise):
                    when |= {(condition[0], not condition[1])}  # what follows is the `else`

    def _statement(self, node: ast.stmt, when: Conditions, names: _Names) -> None:
        match node:
            case ast.ImportFrom(module=module) if _is_vllms(module):
                for alias in node.names:
                    self.conditions[module or "", alias.name] = when
                    self._add("name", node, _Bound(module or "", alias.name), when)
            case ast.Import():
                for alias in node.names:
                    if _is_vllms(alias.name):
                        self._add("name", node, _Bound(alias.name, ""), when)
            case ast.ClassDef():
                self._overrides(node, when)
                self._body(node.body, when, dict(names))
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                narrowed = _narrowed(node)
                inner = names | {
                    arg.arg: bound
                    for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                    if (bound := self._annotated(arg.annotation)) is not None
                }
                self.narrowed = narrowed
                kept = {name: bound for name, bound in inner.items() if name not in narrowed}
                self._body(node.body, when, kept)
            case ast.If(test=test):
                condition = _condition(test)
                self._expression(test, when, names)
                yes = when | {condition} if condition else when
                no = when | {(condition[0], not condition[1])} if condition else when
                self._body(node.body, yes, names)
                self._body(node.orelse, no, names)
            case _:
                if isinstance(node, ast.For):
                    self._assigned(node, names)
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.stmt):
                        self._statement(child, when, names)
                    elif isinstance(child, ast.ExceptHandler):
                        self._body(child.body, when, names)
                    else:
                        self._expression(child, when, names)
                self._assigned(node, names)

    def _assigned(self, node: ast.stmt, names: _Names) -> None:
        """Local names for values whose class is known."""
        pairs: list[tuple[ast.expr, ast.expr]] = []
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=left)], value=ast.Tuple(elts=right)):
                pairs = list(zip(left, right, strict=True))
            case ast.Assign(targets=[target], value=value):
                pairs = [(target, value)]
            case ast.For(target=target, iter=ast.Attribute() as values):
                for bound in self._bound(values, names):
                    if isinstance(target, ast.Name) and target.id not in self.narrowed:
                        names[target.id] = _Bound(bound.module, bound.name, (*bound.chain, "[]"))
        for target, value in pairs:
            if isinstance(target, ast.Name):
                names.pop(target.id, None)
                for bound in self._bound(value, names):
                    if bound.chain and target.id not in self.narrowed:
                        names[target.id] = bound

    # ---- expressions -----------------------------------------------------------------------

    def _expression(self, node: ast.AST, when: Conditions, names: _Names) -> None:
        for inner in ast.walk(node):
            match inner:
                case ast.Attribute():
                    for bound in self._bound(inner, names):
                        self._add("attribute", inner, bound, when)
                case ast.Call(func=func):
                    for bound in self._bound(func, names):
                        self._called(inner, bound, when)

    def _called(self, call: ast.Call, bound: _Bound, when: Conditions) -> None:
        is_open = any(isinstance(arg, ast.Starred) for arg in call.args)
        is_open |= any(keyword.arg is None for keyword in call.keywords)
        keywords = tuple(keyword.arg for keyword in call.keywords if keyword.arg)
        count = len(call.args)
        self._add("call", call, bound, when, positional=count, keywords=keywords, is_open=is_open)

    def _bound(self, node: ast.expr, names: _Names) -> list[_Bound]:
        """What an expression may be; several where versions differ in what is imported."""
        match node:
            case ast.Name(id=name):
                return [names[name]] if name in names else self.imported.get(name, [])
            case ast.Attribute(value=value, attr=attribute):
                inner = self._bound(value, names)
                return [_Bound(one.module, one.name, (*one.chain, attribute)) for one in inner]
        return []

    def _annotated(self, node: ast.expr | None) -> _Bound | None:
        match node:
            case ast.BinOp(left=left, right=ast.Constant(value=None)):
                return self._annotated(left)
            case ast.Name(id=name):
                return next(iter(self.imported.get(name, ())), None)
        return None

    # ---- overrides -------------------------------------------------------------------------

    def _overrides(self, node: ast.ClassDef, when: Conditions) -> None:
        for base in dict.fromkeys(self._vllm_bases(node.name, 9)):
            for method, there in _methods(node.body, when):
                args = method.args
                taken = len(args.posonlyargs) + len(args.args) - 1
                self._add(
                    "override",
                    method,
                    _Bound(base.module, base.name, (method.name,)),
                    there,
                    positional=taken - len(args.defaults),
                    most=None if args.vararg else taken,
                    keywords=tuple(arg.arg for arg in (*args.args, *args.kwonlyargs)),
                    is_open=args.kwarg is not None,
                )

    def _vllm_bases(self, name: str, hops: int) -> Iterator[_Bound]:
        for base in self.bases.get(name, ()) if hops else ():
            if isinstance(base, _Bound):
                yield base
            else:
                yield from self._vllm_bases(base, hops - 1)


def _narrowed(function: ast.AST) -> set[str]:
    """Names whose class is not what their annotation says, after an `isinstance`."""
    calls = (node for node in ast.walk(function) if isinstance(node, ast.Call))
    tests = (call for call in calls if getattr(call.func, "id", "") == "isinstance")
    return {first.id for call in tests if isinstance(first := call.args[0], ast.Name)}


def _methods(
    body: Sequence[ast.stmt], when: Conditions
) -> Iterator[tuple[ast.FunctionDef, Conditions]]:
    for statement in body:
        if isinstance(statement, ast.FunctionDef) and not statement.name.startswith("_"):
            yield statement, when
        elif isinstance(statement, ast.If) and (condition := _condition(statement.test)):
            yield from _methods(statement.body, when | {condition})


def _condition(test: ast.expr) -> tuple[str, bool] | None:
    """(NAME, True) of `NAME.here`, (NAME, False) of `not NAME.here`."""
    match test:
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            found = _condition(inner)
            return (found[0], not found[1]) if found else None
        case ast.Attribute(value=ast.Name(id=name), attr="here"):
            return name, True
        case ast.BoolOp(op=ast.Or(), values=[ast.Name(id="TYPE_CHECKING"), inner]):
            return _condition(inner)
    return None


def _is_vllms(module: str | None) -> bool:
    return module is not None and module.split(".")[0] == "vllm"
