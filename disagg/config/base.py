"""What all sections share: their base, and the types of their values."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
)

Role = Literal["prefill", "decode"]
# The KV connector of the engines behind a router, which defines their `kv_transfer_params`.
ConnectorName = Literal["disagg", "nixl", "example"]

FOLDER_ENV = "DISAGG_FOLDER"
"""The variable with the folder in which relative paths start. A Ray job runs in a folder of Ray's,
while its paths are those of whoever submitted it."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_local(checkpoint: str) -> bool:
    """Whether a checkpoint is a folder, existing or not, and not a name on a model hub."""
    return _HUB_NAME.fullmatch(checkpoint) is None or absolute(Path(checkpoint)).is_dir()


def absolute(path: Path) -> Path:
    """Where a path of the file is; see `FOLDER_ENV`."""
    return Path(os.environ.get(FOLDER_ENV, "")).absolute() / path.expanduser()


def _absolute_checkpoint(checkpoint: str) -> str:
    return str(absolute(Path(checkpoint))) if is_local(checkpoint) else checkpoint


def _numbers_as_text(env: Any) -> Any:
    # YAML reads `OMP_NUM_THREADS: 1` as a number. A bool is refused: its spelling is ambiguous.
    if not isinstance(env, dict):
        return env
    return {
        name: str(value) if type(value) in (int, float) else value for name, value in env.items()
    }


MAX_REPLICAS = 10_000  # of a pool; Ray is tested up to 40,000 actors
LocalPath = Annotated[Path, AfterValidator(absolute)]
Checkpoint = Annotated[str, Field(min_length=1), AfterValidator(_absolute_checkpoint)]
_ENVIRONMENT = {"type": "object", "additionalProperties": {"type": ["string", "number"]}}
Environment = Annotated[
    dict[str, str], BeforeValidator(_numbers_as_text), WithJsonSchema(_ENVIRONMENT)
]


class Section(BaseModel):
    """Base of all sections: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
