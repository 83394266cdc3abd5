"""Small faults in a module's source: the mutants of `tests/mutants.py`.

A mutation replaces one expression or statement: a comparison is moved by one or turned round, `and`
becomes `or`, a condition is dropped, a constant is off by one, a call or an assignment is left out,
a value is not returned. What cannot change an answer is left alone: log lines, messages of errors,
annotations, assertions, and what only a type checker reads.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import NamedTuple

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
}
_FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_LEFT_ALONE = (ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.AnnAssign)


class Mutation(NamedTuple):
    """One replacement. lines: from the start of its statement to its own end. scope: the lines of
    the function or class that it is in. source: the whole mutated module."""

    line: int
    lines: range
    scope: range
    before: str
    after: str
    source: str


def mutations(source: str) -> list[Mutation]:
    """All mutations of a module, in the order of its lines."""
    lines = source.splitlines(keepends=True)
    found: dict[str, Mutation] = {}
    for node, changed, statement, scope in _walk(ast.parse(source), 1, range(1, len(lines) + 1)):
        at = _offset(lines, node.lineno, node.col_offset)
        end = _offset(lines, node.end_lineno or 0, node.end_col_offset or 0)
        text = ast.unparse(changed)
        if isinstance(node, ast.expr):
            text = f"({text})"  # it may stand within another expression
        mutated = source[:at] + text + source[end:]
        covered = range(statement, (node.end_lineno or 0) + 1)
        before = " ".join(source[at:end].split())
        if _compiles(mutated):
            found[mutated] = Mutation(node.lineno, covered, scope, before, text, mutated)
    return sorted(found.values(), key=lambda one: (one.line, one.before, one.after))


def _offset(lines: list[str], line: int, column: int) -> int:
    """The index of a position of ast's, whose columns count bytes."""
    before = lines[line - 1].encode()[:column].decode()
    return sum(len(one) for one in lines[: line - 1]) + len(before)


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


class _Change(NamedTuple):
    """A node, what takes its place, its statement's first line, and its scope."""

    node: ast.expr | ast.stmt
    changed: ast.AST
    statement: int
    scope: range


def _walk(node: ast.AST, statement: int, scope: range) -> Iterator[_Change]:
    if isinstance(node, ast.stmt):
        statement = node.lineno
    if isinstance(node, ast.expr | ast.stmt):
        for changed in _changes(node):
            yield _Change(node, changed, statement, scope)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        scope = range(node.lineno, (node.end_lineno or 0) + 1)
    for child in _children(node):
        yield from _walk(child, statement, scope)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, _LEFT_ALONE) and not isinstance(node, ast.AnnAssign):
        return
    if isinstance(node, ast.Raise) or _is_log(node) or _is_for_types(node):
        return
    if isinstance(node, ast.AnnAssign):
        yield from filter(None, [node.value])
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from (*filter(None, [*node.args.defaults, *node.args.kw_defaults]), *node.body)
    elif isinstance(node, ast.ClassDef):
        yield from node.body
    else:
        yield from ast.iter_child_nodes(node)


def _is_log(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    called = ast.unparse(node.value.func)
    return "log" in called and called.endswith((".debug", ".info", ".warning", ".error"))


def _is_for_types(node: ast.AST) -> bool:
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("TypeVar", "cast")):
        return True
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _changes(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    if isinstance(node, ast.stmt):
        yield from _changed_statements(node)
    else:
        yield from _changed_expressions(node)


def _changed_statements(node: ast.stmt) -> Iterator[ast.AST]:
    match node:
        case ast.Expr(value=ast.Call() | ast.Await() | ast.YieldFrom()) if not _is_log(node):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]) | ast.AugAssign():
            yield ast.Pass()
        case ast.Raise() | ast.Delete() | ast.Break():
            yield ast.Pass()
        case ast.Continue():
            yield from (ast.Pass(), ast.Break())
        case ast.Return(value=value) if value is not None and ast.unparse(value) != "None":
            yield ast.Return(ast.Constant(None))


def _changed_expressions(node: ast.expr) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                for other in _COMPARISONS[type(op)]:
                    yield _with(node, ops=[*ops[:at], other(), *ops[at + 1 :]])
        case ast.BoolOp(op=op, values=values):
            yield _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
            for at in range(len(values)):
                rest = [*values[:at], *values[at + 1 :]]
                yield rest[0] if len(rest) == 1 else _with(node, values=rest)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            yield from (body, orelse)
        case ast.BinOp(op=op) if type(op) in _OPERATORS:
            yield _with(node, op=_OPERATORS[type(op)]())
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=float(value)) if value:
            yield from (ast.Constant(value * 10), ast.Constant(value / 10))
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            yield _with(node, func=ast.Name(_FUNCTIONS[name]))


def _with(node: ast.expr, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed
