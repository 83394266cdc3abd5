"""A folder in the temporary one that belongs to this user alone."""

from __future__ import annotations

import os
from pathlib import Path


def default_folder(temporary: str) -> Path:
    """This user's own folder in the system's temporary one."""
    return Path(temporary) / f"disagg-{os.getuid()}"
