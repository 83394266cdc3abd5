"""Compares what we use of vLLM's with a version of it: `make vllm-next VLLM=0.34.0`.

The version is a number, which is downloaded from PyPI, or the path of a wheel, a source archive or
a folder; without any, the installed one is taken. Prints what is gone, what is called otherwise
now, and which difference of `disagg/vllm_compat` covers it. Exit status 1 if anything is missing
that none covers.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from vllm_sources import installed_source, opened
from vllm_tree import Found, Tree
from vllm_uses import Use, uses_of

from disagg.preflight import vllm_args
from disagg.tables import show
from disagg.vllm_compat import differences, versions

PACKAGE = Path(__file__).parents[1] / "disagg"
BY_NAME = {one.name: one for one in differences.ALL}


class Finding(NamedTuple):
    """problem: missing or signature. cover: the difference that covers it, or nothing."""

    use: Use
    problem: str
    cover: str


def all_uses() -> list[Use]:
    """Of the package's code, and of the files of vLLM's that `disagg check` reads."""
    where = "disagg/preflight/vllm_args.py"
    registries = (
        Use("file", where, file, name) for file, name, _ in vllm_args._REGISTRIES.values()
    )
    return [*uses_of(PACKAGE), *registries]


def compare(uses: Sequence[Use], tree: Tree, vllm: str, known: Tree) -> list[Finding]:
    """What this version lacks or has otherwise. known: the source of a version that runs."""
    active = (use for use in uses if _is_for(use, vllm))
    found = ((use, _problem(use, tree, known)) for use in active)
    return [Finding(use, problem, _cover(use, vllm)) for use, problem in found if problem]


def _is_for(use: Use, vllm: str) -> bool:
    return all(
        versions.matches(BY_NAME[name].versions, vllm) == wanted
        for name, wanted in use.conditions
        if name in BY_NAME
    )


def _cover(use: Use, vllm: str) -> str:
    """A difference of this version that names what is missing."""
    last = next((part for part in reversed((use.name, *use.chain)) if part != "[]"), "")
    here = (one for one in differences.ALL if versions.matches(one.versions, vllm))
    return next((one.name for one in here if f"`{last}`" in one.what), "")


def _problem(use: Use, tree: Tree, known: Tree) -> str:
    if use.kind == "file":
        name = f"vllm.{use.module.removesuffix('.py').replace('/', '.')}"
        module = tree.module(name.removesuffix(".__init__"))
        return "" if module and module.find(use.name) else "missing"
    if not use.name:
        return "" if tree.module(use.module) else "missing"
    found, is_known = resolve(use, tree)
    if use.kind == "override":
        there, _ = resolve(use, known)
        if found is None:  # a method that vLLM never had is our own
            return "missing" if there is not None else ""
        return "" if _takes(use, found) else "signature"
    if found is None:
        return "missing" if is_known else ""
    if use.kind == "call" and not use.is_open and not _binds(use, found, tree):
        return "signature"
    return ""


def resolve(use: Use, tree: Tree) -> tuple[Found | None, bool]:
    """What a use names, and whether that can be known: an attribute of a value whose class is not
    annotated cannot."""
    found = tree.find(use.module, use.name)
    for attribute in use.chain:
        if found is None:
            return None, True
        if found.node is None:
            found = found.module.find(attribute)
            continue
        owner = _element(found, tree) if attribute == "[]" else _class_of(found, tree)
        if owner is None:
            return None, False
        if attribute == "[]":
            found = owner
            continue
        member = tree.member(owner, attribute)
        if member is None and not tree.is_closed(owner):
            return None, False
        found = member
    return found, True


def _class_of(found: Found, tree: Tree) -> Found | None:
    return found if isinstance(found.node, ast.ClassDef) else tree.type_of(found)


def _element(found: Found, tree: Tree) -> Found | None:
    """The class of the elements of a field that is a list."""
    annotation = found.node.annotation if isinstance(found.node, ast.AnnAssign) else None
    if isinstance(annotation, ast.Subscript) and getattr(annotation.value, "id", "") == "list":
        return tree.annotated(found.module, annotation.slice)
    return None


class _Arguments(NamedTuple):
    positional: list[str]
    required: set[str]
    keyword_only: list[str]
    is_open: bool


def _arguments(found: Found, tree: Tree) -> _Arguments | None:
    """Of a function, or of a class's constructor; None if they cannot be known."""
    node = found.node
    if isinstance(node, ast.ClassDef):
        init = tree.member(found, "__init__")
        if init is None:
            return None  # a dataclass, say
        return _arguments(init, tree)
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    args = node.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    decorators = {getattr(one, "id", "") for one in node.decorator_list}
    if names[:1] in (["self"], ["cls"]) and "staticmethod" not in decorators:
        names = names[1:]
    required = names[: len(names) - len(args.defaults)] if args.defaults else names
    only = [arg.arg for arg in args.kwonlyargs]
    needed = {n for n, d in zip(only, args.kw_defaults, strict=True) if d is None}
    is_open = bool(args.vararg or args.kwarg)
    return _Arguments(names, {*required, *needed}, only, is_open)


def _binds(use: Use, found: Found, tree: Tree) -> bool:
    """Whether a call of ours fits."""
    arguments = _arguments(found, tree)
    if arguments is None or arguments.is_open:
        return True
    filled = {*arguments.positional[: use.positional], *use.keywords}
    known = {*arguments.positional, *arguments.keyword_only}
    fits = use.positional <= len(arguments.positional) and set(use.keywords) <= known
    return fits and arguments.required <= filled


def _takes(use: Use, found: Found) -> bool:
    """Whether vLLM can call our override as it would call its own."""
    arguments = _arguments(found, Tree(Path()))
    if arguments is None:
        return True
    count = len(arguments.positional)
    enough = use.most is None or count <= use.most
    only = set(arguments.keyword_only)
    required = len([name for name in arguments.positional if name in arguments.required])
    return (
        enough
        and use.positional <= max(count, required)
        and (use.is_open or only <= set(use.keywords))
    )


def lines(findings: Sequence[Finding]) -> Iterator[tuple[str, str, str, str]]:
    """Rows of the table: what, the problem, its cover, where we use it."""
    for (what, problem, cover), places in grouped(findings).items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield what, problem, cover or "NOTHING", places[0] + more


def grouped(findings: Sequence[Finding]) -> dict[tuple[str, str, str], list[str]]:
    found: dict[tuple[str, str, str], list[str]] = {}
    for finding in sorted(findings, key=lambda one: (bool(one.cover), str(one.use))):
        key = str(finding.use), finding.problem, finding.cover
        found.setdefault(key, []).append(finding.use.where)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("vllm", nargs="?", help="a version, a wheel, an archive or a folder")
    name = parser.parse_args(argv).vllm
    console = Console(highlight=False, soft_wrap=True)
    with opened(name) as source:
        uses = all_uses()
        found = compare(uses, Tree(source.root), source.version, Tree(installed_source().root))
    kinds = ", ".join(f"{count} of {kind}" for kind, count in Counter(u.kind for u in uses).items())
    console.print(f"vLLM {source.version} beside {len(uses)} uses: {kinds}")
    if not versions.matches(versions.RANGE, source.version):
        console.print(f"outside of the range {versions.RANGE} of disagg/vllm_compat/versions.py")
    if found:
        table = Table("used", "problem", "covered by", "where", title=f"vLLM {source.version}")
        for row in lines(found):
            table.add_row(*row)
        show(table)
    bad = [one for one in found if not one.cover]
    console.print(f"{len(found) - len(bad)} covered, {len(bad)} not covered")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
