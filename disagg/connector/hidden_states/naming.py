"""File names: from a request id, which a client may have chosen, and back to the writer.

    <request>.<life>-<number>.safetensors          the states; complete under this name
    <request>.<life>-<number>.safetensors.error    why there are no states
    .<life>.lock                                   one per writer: pending writes
    .<life>-<number>.tmp                           an incomplete file

`life` is random for each life of an engine and `number` counts its requests, so names never
collide, whatever the ids are; the request's part is for people. It must never contain a separator
or lead out of the folder.
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
_LIFE_BYTES = 8
# With the longest suffixes this stays below the 255 bytes that file systems allow.
_LONGEST = 160
_SHOWN = 120
# The last match: an id may end like one of our names.
_NAME = re.compile(r".+\.([0-9a-f]{16})-([1-9][0-9]{0,18})\.safetensors", re.DOTALL)
_LOCK = re.compile(r"\.([0-9a-f]{16})\.lock")
_TEMPORARY = re.compile(r"\.([0-9a-f]{16})-[1-9][0-9]{0,18}\.tmp")


def new_life() -> str:
    """A name for one life of a writer."""
    return secrets.token_hex(_LIFE_BYTES)


def file_name(request_id: str, life: str, number: int) -> str:
    """The file of one request; different for every (life, number), whatever the id."""
    return f"{request_part(request_id)}.{life}-{number}{SUFFIX}"


def request_part(request_id: str) -> str:
    """The id, percent-encoded where needed; different ids give different parts.

    A long id becomes its beginning and a digest of the whole, joined by a mark that no encoding
    produces.
    """
    # A Python string may hold a lone surrogate, which is not UTF-8.
    part = quote(request_id.encode("utf-8", "surrogatepass"), safe="")
    if part.startswith("."):
        part = "%2E" + part[1:]  # neither hidden nor "." nor ".."
    if len(part) > _LONGEST:
        digest = hashlib.blake2b(part.encode(), digest_size=16).hexdigest()
        return f"{part[:_SHOWN]}%-{digest}"
    return part or "%"


@dataclass(frozen=True)
class Written:
    """A parsed path: its writer's life, and the request's number in that life."""

    path: Path
    life: str
    number: int

    @property
    def lock(self) -> Path:
        """The writer's lock file."""
        return lock_path(self.path.parent, self.life)

    @property
    def error(self) -> Path:
        """The file with the reason why the writer failed."""
        return error_path(self.path)


def parse(path: str | os.PathLike[str]) -> Written:
    """Raises ValueError if no file of ours can have this path."""
    path = Path(path)
    found = _NAME.fullmatch(path.name)
    if found is None:
        raise ValueError(
            f"{path}: is not a file of HiddenStatesConnector; pass the hidden_states_path of an "
            "answer's kv_transfer_params"
        )
    return Written(path, found[1], int(found[2]))


def error_path(path: Path) -> Path:
    """The error file of a states file."""
    return path.with_name(path.name + ERROR_SUFFIX)


def lock_path(folder: Path, life: str) -> Path:
    """The lock file of one life."""
    return folder / f".{life}.lock"


def life_of(lock: str) -> str | None:
    """The life of the lock file with this name; None for other files."""
    found = _LOCK.fullmatch(lock)
    return found[1] if found else None


def temporary_name(life: str, number: int) -> str:
    """The name of an incomplete file."""
    return f".{life}-{number}.tmp"


def life_of_temporary(name: str) -> str | None:
    """The life of the incomplete file with this name; None for other files."""
    found = _TEMPORARY.fullmatch(name)
    return found[1] if found else None
