"""The deployment's secret: it signs tickets, and authenticates the control channel.

It comes from `DISAGG_SECRET`, or else from a file that this user's engines on this host share.
"""

from __future__ import annotations

import hashlib
import os
import secrets

from disagg.errors import ConfigError
from disagg.private_files import PrivateFolder, open_regular, read_own_file, user_folder

SECRET_VARIABLE = "DISAGG_SECRET"
MIN_LENGTH = 16

_FILE, _MOST_BYTES = "secret", 4096


def read_secret() -> bytes:
    """The configured secret, or else the user's.

    Raises ConfigError if it is too short to be one, or if another user may know it.
    """
    configured = os.environ.get(SECRET_VARIABLE)
    if configured is not None:
        return _checked(configured.strip().encode(), SECRET_VARIABLE)
    return user_secret()


def secret_for(purpose: bytes, secret: bytes) -> bytes:
    """A key of 64 bytes for one purpose. It opens nothing of another, and reveals no secret."""
    return hashlib.blake2b(purpose, key=hashlib.sha256(secret).digest()).digest()


def user_secret() -> bytes:
    """The secret of this user on this host, generated at its first use. Raises ConfigError."""
    folder = user_folder().make(SECRET_VARIABLE)
    try:
        return _checked(_shared(folder).strip(), str(folder.path / _FILE))
    except OSError as error:
        raise ConfigError(
            f"{folder.path / _FILE}: {error}; remove it, or set {SECRET_VARIABLE}"
        ) from error


def _shared(folder: PrivateFolder) -> bytes:
    """The content of this user's file, made if missing."""
    with folder.opened() as opened:
        try:
            return read_own_file(_FILE, _MOST_BYTES, opened)
        except FileNotFoundError:
            fresh = f"{_FILE}.{os.getpid()}.{secrets.token_hex(4)}"
        descriptor = open_regular(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, folder=opened)
        try:
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
            # Fails if another engine was faster; both then read that one.
            os.link(fresh, _FILE, src_dir_fd=opened, dst_dir_fd=opened)
        except FileExistsError:
            pass
        finally:
            os.unlink(fresh, dir_fd=opened)
        return read_own_file(_FILE, _MOST_BYTES, opened)


def _checked(secret: bytes, source: str) -> bytes:
    if len(secret) < MIN_LENGTH:
        raise ConfigError(
            f"{source}: {len(secret)} characters — a secret needs at least {MIN_LENGTH}; make one "
            "with: openssl rand -hex 32"
        )
    return secret
