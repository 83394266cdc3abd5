"""Who may import whom: the rules of the design, held over the source of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "disagg"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# What each part may import of ours, besides itself. A part is a folder or a top-level module; a
# name with a dot allows that one module.
LEAVES = {"errors", "config"}
ALLOWED = {
    "__init__": set[str](),
    "errors": set[str](),
    "keepalive": set[str](),
    "config_file": {"errors"},
    "config": {"errors", "config_file", "transport.names"},
    "credentials": {"config", "errors"},
    "vllm_args": set[str](),
    "checkpoint_tokenizer": set[str](),
    "checkpoint": {"errors", "checkpoint_tokenizer"},
    "pool_checks": {"config", "config_file", "vllm_args", "engine.args"},
    "checks": {
        "config", "config_file", "credentials", "errors", "pool_checks", "vllm_args",
        "transport.shared_storage",
    },
    "resolved": {"config", "checks", "engine.args", "engine.spec"},
    "cli": {
        "config", "errors", "checks", "resolved", "checkpoint", "cluster", "router", "bench",
        "planning", "dashboards", "options",
    },
    # The router's own estimate of who waits how long, with a clock of the simulation's.
    "planning": {"errors", "config_file", "router.helping", "router.holding", "router.reading"},
    "options": set[str](),
    "dashboards": {"errors"},
    "transport": {"errors", "keepalive"},
    "store": {"errors"},
    "router": {*LEAVES, "credentials", "keepalive"},
    "identity": set[str](),
    "connector": {"errors", "identity", "transport", "store"},
    # What an engine's own HTTP route needs to release a lease; never caches or transports.
    "engine": {
        *LEAVES,
        "identity",
        "transport.base",
        "transport.handoff",
        "transport.secret",
        "transport.ticket",
    },
    "cluster": {*LEAVES, "config_file", "credentials", "engine", "router"},
    "bench": {
        *LEAVES, "checks", "checkpoint", "cluster", "engine", "router", "transport", "store",
        "planning", "options",
    },
}  # fmt: skip
HEAVY = {
    "vllm": {"connector", "engine", "identity"},  # there for its types alone
    "ray": {"engine", "cluster"},
    "cupy": {"transport"},
    "torch": {"bench", "connector", "engine", "transport"},
    "transformers": {"connector", "engine"},
}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imports_of(path: Path) -> Iterator[str]:
    """Full names of all that a file imports, at any depth of its code."""
    package = ["disagg", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from disagg import errors` names a module, `from disagg.errors import X` does not.
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) == "import_module":
            (argument,) = node.args
            if isinstance(argument, ast.Constant):
                yield str(argument.value)


def _called(node: ast.Call) -> str | None:
    return getattr(node.func, "attr", getattr(node.func, "id", None))


def allows(part: str, name: str) -> bool:
    """Whether a part may import this name of ours."""
    inner = name.removeprefix("disagg.")
    allowed = {*ALLOWED[part], part}
    return inner == "__version__" or any(
        inner == rule or inner.startswith(f"{rule}.") for rule in allowed
    )


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_it_may(path: Path) -> None:
    part = part_of(path)
    assert part in ALLOWED, f"{part}: a new part; say in ALLOWED what it may import"
    for name in imports_of(path):
        top = name.split(".")[0]
        if top == "disagg":
            assert allows(part, name), f"{part} must not import {name}"
        elif top in HEAVY:
            assert part in HEAVY[top], f"{top} is imported in {sorted(HEAVY[top])} only"


def test_the_rules_are_held_against_something() -> None:
    assert {"cli", "config", "transport"} <= {part_of(path) for path in SOURCES}
    assert not allows("router", "disagg.transport.client.Endpoint")
    assert not allows("engine", "disagg.transport.server.Server")
    assert allows("engine", "disagg.transport.ticket.verify")
