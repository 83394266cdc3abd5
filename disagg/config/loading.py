"""Reads files, and words of the command line. Each problem is one line that names the key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import (
    TypeAdapter,
    ValidationError,
)

from disagg.config.base import MAX_REPLICAS, Role
from disagg.config.deployment import Deployment, ModelAndEngines, SeveralDeployments
from disagg.config.router import RouterSection
from disagg.config_file import changed, explain, read_mapping
from disagg.errors import ConfigError


def load_router(path: Path | None, options: Mapping[str, Any]) -> RouterSection:
    """The settings of a router without a deployment. The file has the keys of `router`; `options`
    override them. Raises ConfigError with one line for each problem."""
    content = read_mapping(path) if path is not None else {}
    merged = {**content, **options}
    for name in ("pairing", "cors"):
        section = content.get(name, {})
        if isinstance(section, dict):
            merged[name] = {**section, **options.get(name, {})}
        else:
            merged[name] = section  # refused below
    try:
        return RouterSection.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(explain(error, RouterSection)) from error


def load(path: str | Path) -> Deployment:
    """Read the file of one deployment. Raises ConfigError with one line for each problem."""
    deployments = load_all(path)
    if deployments[0].group:
        raise ConfigError("deployments: several are not possible here; name a file with one")
    return deployments[0]


def load_all(path: str | Path, changes: Sequence[str] = ()) -> list[Deployment]:
    """Read a file with one deployment or several; see `Deployment.group`. `changes`: words such as
    `router.port=0`, made before the file is judged. Raises ConfigError with one line for each
    problem."""
    return read(read_mapping(Path(path)), changes)


def read(content: Mapping[Any, Any], changes: Sequence[str] = ()) -> list[Deployment]:
    """As `load_all`, of what a file holds."""
    content = changed(content, changes)
    several = "deployments" in content
    if several and (alone := [key for key in content if key in _OF_ONE]):
        raise ConfigError(
            [
                f"{key}: belongs to one deployment, but the file has a list of them; move it into "
                "an entry of deployments, or remove deployments"
                for key in alone
            ]
        )
    try:
        if several:
            found = SeveralDeployments.model_validate(content)
            if doubles := list(found.doubles()):
                raise ConfigError(doubles)
            router, deployments = found.router, found.each()
        else:
            deployment = Deployment.model_validate(content)
            router, deployments = deployment.router, [deployment]
    except ValidationError as error:
        raise ConfigError(explain(error, SeveralDeployments if several else Deployment)) from error
    given = "models" if router.engines.is_empty else "engines"
    if given == "engines" or router.models:
        raise ConfigError(
            f"router.{given}: names engines that run already, but a deployment starts its own — "
            "remove it, or run `disagg router`"
        )
    return deployments


_OF_ONE = {"name", *ModelAndEngines.model_fields}


def schema() -> dict[str, Any]:
    """The JSON Schema of a file, for editors."""
    kinds = TypeAdapter[Any](Deployment | SeveralDeployments)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A file for disagg serve",
        **kinds.json_schema(),
    }


def replicas_of(words: Sequence[str]) -> dict[Role, int]:
    """The numbers of engines in words such as `prefill=3`. Raises ConfigError."""
    found: dict[Role, int] = {}
    for word in words:
        role, _, count = word.partition("=")
        if role not in ("prefill", "decode"):
            raise ConfigError(f"{word!r}: write prefill=N or decode=N")
        if not count.isdecimal() or int(count) < 1:
            raise ConfigError(f"{role}: {count!r} — must be a whole number, at least 1")
        if int(count) > MAX_REPLICAS:
            raise ConfigError(f"{role}: {count} — must be at most {MAX_REPLICAS}; set less")
        if role in found:
            raise ConfigError(f"{role}: given twice; keep one")
        found["prefill" if role == "prefill" else "decode"] = int(count)
    return found
