"""The deployment's secret: it signs tickets, and authenticates the control channel.

It comes from `DISAGG_SECRET`, or else from a file that this user's engines on this host share.
"""

from __future__ import annotations

import os
import secrets
import tempfile

from disagg.errors import ConfigError
from disagg.transport.host.private_folder import default_folder

SECRET_VARIABLE = "DISAGG_SECRET"


def read_secret() -> bytes:
    """The secret; if none is configured, generated once per user and host."""
    configured = os.environ.get(SECRET_VARIABLE)
    if configured:
        return configured.encode()
    folder = default_folder(tempfile.gettempdir())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"{folder} can be written by other users, so its secret is not safe; remove it, or set "
            f"{SECRET_VARIABLE}"
        )
    path = folder / "secret"
    if not path.exists():
        fresh = folder / f"secret.{os.getpid()}.{secrets.token_hex(4)}"
        fresh.touch(mode=0o600)
        fresh.write_text(secrets.token_hex(32))
        try:
            os.link(fresh, path)  # fails if another engine was faster; both then read that one
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    return path.read_text().encode()
