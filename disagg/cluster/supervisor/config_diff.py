"""Which changes of the YAML a running deployment refuses, and which engines a change replaces.

Only compares: it must never import Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from disagg.config import Deployment, Role
from disagg.config_file import show

# Engines of one handoff must agree on these values, or a client would notice the change.
_FIXED = (
    "name",
    "deployments",
    "model",
    "ray",
    "router",
    "transfer.secret_env",
    "transfer.secret_file",
    "transfer.storage.checksum",
    "transfer.storage.path",
    "transfer.strict",
)


def refused(running: Deployment, wanted: Deployment) -> list[str]:
    """One line for each change that needs a restart of the deployment."""
    before, after = _content(running), _content(wanted)
    return [
        f"{path}: {show(old)} -> {show(new)} — cannot change while serving; stop the deployment "
        "and start it with this file"
        for fixed in _FIXED
        for path, old, new in _differences(fixed, _at(before, fixed), _at(after, fixed))
    ]


def is_outdated(spec_of: Deployment, wanted: Deployment, role: Role) -> bool:
    """Whether an engine that was started for `spec_of` must be replaced to match `wanted`."""
    return _engine(spec_of, role) != _engine(wanted, role)


def _engine(deployment: Deployment, role: Role) -> tuple[object, ...]:
    """All settings of an engine of this role."""
    engine, pool = deployment.engine, deployment.pool(role)
    return (
        deployment.model,
        deployment.transfer,
        deployment.tiers,
        (engine.args, engine.env, engine.hang_timeout_s),
        (pool.args, pool.env, pool.resources),
    )


def _content(deployment: Deployment) -> dict[str, Any]:
    """As the file has it: the router's part of each of several deployments is in its own entry."""
    content = deployment.model_dump()
    models = content["router"].pop("models")
    content["deployments"] = {model.pop("name"): model for model in models}
    return content


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
