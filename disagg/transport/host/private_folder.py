"""The default folder for this user's files, in the system's temporary folder."""

from __future__ import annotations

import os
from pathlib import Path


def default_folder(temporary: str) -> Path:
    """This user's folder in `temporary`."""
    return Path(temporary) / f"disagg-{os.getuid()}"
