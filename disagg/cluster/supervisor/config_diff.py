"""What a changed YAML asks of a deployment that serves, and what it cannot have.

Compares; does nothing, and knows neither Ray nor engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from disagg.config import Deployment, Role
from disagg.config_file import show

# Both ends of what is under way must agree on these, or a client would notice.
_FIXED = (
    "name",
    "model",
    "router",
    "transfer.secret_env",
    "transfer.secret_file",
    "transfer.storage.path",
    "transfer.strict",
)


def refused(running: Deployment, wanted: Deployment) -> list[str]:
    """One line for each change that needs a new start."""
    before, after = running.model_dump(), wanted.model_dump()
    return [
        f"{path}: {show(old)} -> {show(new)} — cannot change while it serves; stop the "
        "deployment and start it with this file"
        for fixed in _FIXED
        for path, old, new in _differences(fixed, _at(before, fixed), _at(after, fixed))
    ]


def is_outdated(spec_of: Deployment, wanted: Deployment, role: Role) -> bool:
    """Whether an engine that was started for `spec_of` must be replaced to be as `wanted`."""
    return _engine(spec_of, role) != _engine(wanted, role)


def _engine(deployment: Deployment, role: Role) -> tuple[object, ...]:
    """All that an engine of this role is started with."""
    engine, pool = deployment.engine, deployment.pool(role)
    return (
        deployment.model,
        deployment.transfer,
        deployment.tiers,
        (engine.args, engine.env, engine.hang_timeout_s),
        (pool.args, pool.env, pool.resources),
    )


def _at(content: dict[str, Any], path: str) -> Any:
    found: Any = content
    for key in path.split("."):
        found = found[key]
    return found


def _differences(path: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in old | new:
            yield from _differences(f"{path}.{key}", old.get(key), new.get(key))
    elif old != new:
        yield path, old, new
