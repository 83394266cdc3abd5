"""Who may import whom: the rules of the design, held over the source of the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "disagg"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# What each part may import of ours, besides itself. A part is a folder or a top-level module; a
# name allows that module, or all modules of that folder but not of its sub-folders.
LEAVES = {"errors", "config"}
_TRANSPORT = {
    "errors",
    "transport.base",
    "transport.blocks",
    "transport.deadline",
    "transport.protocol",
}
_ROUTER = {*LEAVES, "router.topology"}
ALLOWED = {
    "__init__": set[str](),
    "__main__": {"cli"},
    "errors": set[str](),
    "keepalive": set[str](),
    "tables": set[str](),
    "safe_logging": set[str](),
    "redaction": set[str](),
    "options": set[str](),
    "private_files": {"errors"},
    "checksums": {"transport.control.secret"},
    "config_file": {"errors", "redaction"},
    "config_units": set[str](),
    "object_urls": set[str](),
    "config": {
        "errors", "config_file", "config_units", "checksums", "object_urls", "transport.names",
    },
    "models": {"errors"},
    "local": {"errors", "identity", "private_files"},
    "credentials": {"config", "errors", "transport.control.secret"},
    "preflight": {
        "config", "config_file", "credentials", "errors", "redaction", "engine.args",
        "engine.spec", "models.catalogue", "object_urls", "private_files",
        "transport.nixl.settings", "vllm_compat",
    },
    "cli": {
        "config", "errors", "preflight", "cluster", "router", "bench", "testing", "planning",
        "dashboards", "options", "local", "models",
    },
    # The router's own estimate of who waits how long, with a clock of the simulation's.
    "planning": {
        "errors", "tables", "config_file", "router.pairing.local_prefill",
        "router.pairing.first_token_hold", "router.pairing.prefill_backlog",
    },
    "dashboards": {"errors"},
    "identity": {"vllm_compat"},
    "vllm_compat": set[str](),
    "store": {"errors", "checksums", "identity.process", "private_files", "safe_logging"},
    "store.objects": {
        "errors", "checksums", "object_urls", "private_files", "safe_logging", "store",
    },
    # HOW bytes move. A way may use control, host and device; these use no way.
    "transport": {
        *_TRANSPORT, "safe_logging", "transport.control", "transport.device.open",
        "transport.device.staging", "transport.host", "transport.nccl", "transport.nixl",
        "transport.one_sided", "transport.tcp",
        "checksums", "identity.process", "private_files",  # shared_storage
    },
    "transport.control": {
        *_TRANSPORT, "keepalive", "safe_logging", "transport.host",
        "transport.one_sided.hazard_pointers", "transport.one_sided.lease_board", "private_files",
    },
    "transport.host": _TRANSPORT,
    "transport.device": _TRANSPORT,
    "transport.one_sided": {
        *_TRANSPORT, "identity.process", "transport.device", "transport.host",
    },
    "transport.nccl": {
        *_TRANSPORT, "safe_logging", "transport.control", "transport.device",
        "transport.host.fd_watcher",
    },
    "transport.nixl": {
        *_TRANSPORT, "transport.device", "transport.host", "transport.one_sided",
    },
    "transport.tcp": {
        *_TRANSPORT, "safe_logging", "transport.control", "transport.device.staging",
        "transport.host.helper_threads",
    },
    # WHEN and WHAT to move. The three connectors stand beside each other over base.py.
    "connector": {
        "errors", "identity", "redaction", "transport", "connector.handoff.connector",
        "connector.hidden_states.connector",
        "engine.vllm_patches.patching",  # to refuse an engine that lacks a patch
        "vllm_compat",
    },
    "connector.handoff": {
        "errors", "identity", "safe_logging", "connector", "transport", "transport.control",
        "transport.nixl.settings",
        "transport.device", "transport.host", "checksums", "private_files", "vllm_compat",
    },
    "connector.offload": {
        "errors", "identity", "connector", "store", "store.objects", "transport",
        "transport.device",
        "transport.host", "transport.control.secret", "checksums", "vllm_compat",
    },
    "connector.hidden_states": {
        "errors", "connector", "transport.blocks", "transport.deadline",
        "private_files", "safe_logging",
    },
    # The router's layers, from the outside in: processes, server, request, pairing, engines,
    # upstream, with api and telemetry for all.
    "router": {
        *LEAVES, "credentials", "local.running", "router.discovery", "router.processes",
        "router.server",
    },
    "router.processes": {*_ROUTER, "router.server", "router.main"},
    "router.server": {
        *_ROUTER, "credentials", "router.api", "router.telemetry", "router.upstream",
        "router.caches", "router.engines", "router.request", "router.discovery",
        "private_files", "safe_logging",
    },
    "router.request": {
        *_ROUTER, "router.api", "router.telemetry", "router.upstream", "router.caches",
        "router.engines", "router.pairing",
    },
    "router.pairing": {
        *_ROUTER, "router.api", "router.telemetry", "router.caches", "router.engines",
    },
    # What engines' caches hold. Of other parts it knows nothing.
    "router.caches": _ROUTER,
    "router.discovery": {*_ROUTER, "config_file", "keepalive"},
    "router.engines": {*_ROUTER, "router.api", "router.telemetry", "router.upstream"},
    "router.upstream": {*_ROUTER, "keepalive", "router.api"},
    "router.telemetry": _ROUTER,
    "router.api": {"config"},
    # What an engine's own HTTP route needs to release a lease; never caches or transports.
    "engine": {
        *LEAVES, "identity", "safe_logging", "engine.vllm_patches", "transport.deadline",
        "transport.fetch", "transport.control.secret", "transport.control.ticket", "vllm_compat",
    },
    "engine.vllm_patches": {"errors", "vllm_compat"},
    "cluster": {
        *LEAVES, "config_file", "credentials", "engine", "router", "router.server",
        "router.processes", "cluster.supervisor", "identity.process", "local.running",
        "private_files",
    },
    "cluster.supervisor": {*LEAVES, "config_file", "cluster", "engine", "router.topology"},
    # The last ones may use what they measure.
    "testing": {
        *LEAVES, "cluster", "models", "preflight", "router.api.bodies",
        "engine.vllm_patches.busy_poll", "engine.vllm_patches.fork_workers",
        "private_files", "tables",
    },
    "bench": {
        *LEAVES, "options", "testing", "transport.names", "bench.first_token", "bench.router",
        "bench.serve", "bench.speeds", "bench.transfer", "chaos", "chaos.faults",
    },
    "bench.first_token": {
        *LEAVES, "tables", "testing", "bench.results", "bench.transfer.gpus", "bench.transfer.nixl",
        "transport.names",
    },
    "bench.router": {
        *LEAVES, "tables", "testing", "bench.results",
        # What `router --knows` and `reuse` measure.
        "router.caches", "router.engines", "router.pairing", "router.request",
        "router.server.server", "router.telemetry", "router.topology",
        "store",  # what `evictions` measures
    },
    "bench.serve": {
        *LEAVES, "tables", "testing", "bench.first_token", "bench.results", "router.upstream",
        "router.topology",
        "bench.charts", "router.telemetry.engine_metrics",  # parts of a first token
    },
    "bench.speeds": {
        *LEAVES, "tables", "testing", "planning", "bench.first_token", "bench.results",
        "bench.serve", "router.api",
    },
    "bench.transfer": {
        *_TRANSPORT, "testing", "bench.html", "bench.results", "transport", "transport.control",
        "transport.device", "transport.host", "transport.names", "transport.nixl.settings",
        "transport.one_sided", "private_files", "checksums", "tables",
    },
    "chaos": {
        *LEAVES, "tables", "credentials", "testing", "bench.results", "cluster", "preflight",
        "router", "router.server", "transport.names",
    },
    "chaos.faults": {
        *LEAVES, "tables", "testing", "bench.results", "router.api.bodies", "vllm_compat",
    },
}  # fmt: skip
HEAVY = {
    # In identity for its types alone; in testing for the process that servers are forks of.
    "vllm": {"connector", "engine", "identity", "testing", "vllm_compat"},
    "ray": {"bench", "cluster", "engine"},  # in bench for Ray Serve LLM, a peer
    "cupy": {"transport"},
    "torch": {"bench", "connector", "engine", "models", "testing", "transport"},
    "transformers": {"connector", "engine", "models", "testing"},
}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
    for path in SOURCES
}


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return ".".join(relative.parts[:-1]) or relative.stem


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
    if inner == "__version__":
        return True
    # `from disagg.errors import X` names a module's content, `from disagg import errors` a module.
    module = inner if inner in MODULES else inner.rpartition(".")[0]
    folder = module if any(other.startswith(f"{module}.") for other in MODULES) else None
    folder = folder or module.rpartition(".")[0]
    return bool({module, folder} & {*ALLOWED[part], part})


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_it_may(path: Path) -> None:
    part = part_of(path)
    assert part in ALLOWED, f"{part}: a new part; say in ALLOWED what it may import"
    for name in imports_of(path):
        top = name.split(".")[0]
        if top == "disagg":
            assert allows(part, name), f"{part} must not import {name}"
        elif top in HEAVY:
            heavy = sorted(HEAVY[top])
            assert part.split(".")[0] in heavy, f"{top} is imported in {heavy} only"


def test_no_circle_of_files() -> None:
    """By imports at the top of files: a circle of those makes one module of many."""
    edges = {module_of(path): set(top_imports(path)) & MODULES for path in SOURCES}
    order = TopologicalSorter(edges)
    order.prepare()  # raises CycleError, which names the circle


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def top_imports(path: Path) -> Iterator[str]:
    """Modules of ours that a file imports, at any depth, but for its types alone."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and id(node) not in typing_only:
            module = node.module.removeprefix("disagg").removeprefix(".")
            for alias in node.names:
                full = f"{module}.{alias.name}".removeprefix(".")
                if (found := full if full in MODULES else module) != module_of(path):
                    yield found


def test_sub_folders_import_one_way() -> None:
    """Of two sub-folders of one folder, at most one imports the other."""
    parts = {part for part in ALLOWED if "." in part}
    edges = {
        (part, target)
        for path in SOURCES
        if (part := part_of(path)) in parts
        for name in top_imports(path)
        if (target := name.rpartition(".")[0]) in parts
        and target != part
        and target.split(".")[0] == part.split(".")[0]
    }
    assert not {(a, b) for a, b in edges if (b, a) in edges}


def test_the_rules_are_held_against_something() -> None:
    assert {"cli", "config", "transport.control"} <= {part_of(path) for path in SOURCES}
    assert not allows("router.request", "disagg.transport.control.client.Endpoint")
    assert not allows("engine", "disagg.transport.control.server.Server")
    assert allows("engine", "disagg.transport.control.ticket.verify")
    assert not allows("router.api", "disagg.router.request.service")
