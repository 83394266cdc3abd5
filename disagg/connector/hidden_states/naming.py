"""File names: from a request id, which a client may have chosen, and back to who writes it.

    <request>.<life>-<number>.safetensors          the states; whole when it has this name
    <request>.<life>-<number>.safetensors.error    why there are none
    .<life>.lock                                   one per writer: what it still owes (promises.py)
    .<life>-<number>.tmp                           a file before it has its name

`life` is random for each life of an engine and `number` counts its requests, so that names never
collide, whatever the ids are; the request's part is there for people. It must never hold a
separator or be a way out of the folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

SUFFIX = ".safetensors"
ERROR_SUFFIX = ".error"
LOCK_GLOB = ".*.lock"

_LIFE_BYTES = 8
# With the longest suffixes this stays below the 255 bytes that file systems allow.
_LONGEST = 160
_SHOWN = 120
# The last of what looks so: an id may end like a name of ours.
_NAME = re.compile(r".+\.([0-9a-f]{16})-([1-9][0-9]{0,18})\.safetensors", re.DOTALL)
_LOCK = re.compile(r"\.([0-9a-f]{16})\.lock")


def new_life() -> str:
    """A name for one life of a writer."""
    return secrets.token_hex(_LIFE_BYTES)


def file_name(request_id: str, life: str, number: int) -> str:
    """The file of one request; different for every (life, number), whatever the id."""
    return f"{request_part(request_id)}.{life}-{number}{SUFFIX}"


def request_part(request_id: str) -> str:
    """The id, percent-encoded where it isn't plain; different ids give different parts.

    Of a long id the beginning and a digest of the whole are left, with a mark between them that
    no encoding gives.
    """
    # A lone surrogate is no UTF-8, but a Python string may hold one.
    part = quote(request_id.encode("utf-8", "surrogatepass"), safe="")
    if part.startswith("."):
        part = "%2E" + part[1:]  # neither hidden nor "." nor ".."
    if len(part) > _LONGEST:
        digest = hashlib.blake2b(part.encode(), digest_size=16).hexdigest()
        return f"{part[:_SHOWN]}%-{digest}"
    return part or "%"


@dataclass(frozen=True)
class Written:
    """What a path says: its writer's life, and the number of the request in it."""

    path: Path
    life: str
    number: int

    @property
    def lock(self) -> Path:
        """The writer's lock file."""
        return lock_path(self.path.parent, self.life)

    @property
    def error(self) -> Path:
        """Where the writer says why it could not write."""
        return error_path(self.path)


def parse(path: str | os.PathLike[str]) -> Written:
    """Raises ValueError if no file of ours can have this path."""
    path = Path(path)
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(
            f"{path}: is no file of HiddenStatesConnector; pass the hidden_states_path of an "
            "answer's kv_transfer_params"
        )
    return Written(path, found[1], int(found[2]))


def error_path(path: Path) -> Path:
    """Beside the file."""
    return path.with_name(path.name + ERROR_SUFFIX)


def lock_path(folder: Path, life: str) -> Path:
    """The lock file of one life."""
    return folder / f".{life}.lock"


def life_of(lock: Path) -> str | None:
    """Whose lock file this is; None if it is none."""
    found = _LOCK.fullmatch(lock.name)
    return found[1] if found else None


def temporary_path(folder: Path, life: str, number: int) -> Path:
    """Where a file is written before it gets its name."""
    return folder / f".{life}-{number}.tmp"


def temporary_paths(folder: Path, life: str) -> list[Path]:
    """All that a life left half written."""
    return list(folder.glob(f".{life}-*.tmp"))
