"""Where an engine argument is in the deployment's file, for the user."""

from __future__ import annotations

from typing import get_args

from disagg.config import Deployment, Role
from disagg.config_file import show

CPU_BLOCK_DEFAULT = 128  # vllm/platforms/cpu.py
ROLES: tuple[Role, ...] = get_args(Role)


def key_of(deployment: Deployment, role: Role, name: str) -> str:
    """The argument's path in the file: the pool's own, or the one in `engine.args`."""
    own = name in deployment.pool(role).args or name not in deployment.engine.args
    return f"{role}.args.{name}" if own else f"engine.args.{name}"


def described(deployment: Deployment, role: Role, name: str) -> str:
    """The argument's path and value."""
    args = deployment.args(role)
    value = show(args[name]) if name in args else "not set"
    return f"{key_of(deployment, role, name)}: {value}"
