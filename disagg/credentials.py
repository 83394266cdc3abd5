"""A deployment's secrets: its own secret, the keys of clients and operators, and the TLS files.

They are read and checked before anything listens. A message must never show a secret or a key, nor
a part of one. It names the place of the entry instead.
"""

from __future__ import annotations

import os
import re
import secrets
import ssl
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from disagg.config import OTHERS, Deployment, RouterSection
from disagg.errors import ConfigError
from disagg.transport.control.secret import MIN_LENGTH, user_secret

_MOST_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9][\w.@-]{0,63}", re.ASCII)
_KEY = re.compile(r"[!-~]+")
_COMMENT = re.compile(r"(^|\s)#.*")


@dataclass(frozen=True)
class ApiKey:
    """The key of a client or, with `is_admin`, of an operator. The name is for the log."""

    name: str | None
    value: str = field(repr=False)
    is_admin: bool = False


class TlsFiles(NamedTuple):
    """A PEM certificate (with its chain) and its key."""

    cert: Path
    key: Path


def secret(deployment: Deployment) -> str:
    """The configured secret, or a new random one. Call it once per run, and pass the result on.

    A shared tier outlives the run, and its chunks are believed with the same secret only: then it
    is this user's secret on this host. Raises ConfigError if the secret is configured twice,
    unreadable or too short, or if another user may know it.
    """
    configured = configured_secret(deployment)
    if configured is not None:
        return configured
    lasting = deployment.tiers.directory is not None or deployment.tiers.objects is not None
    return user_secret().decode() if lasting else secrets.token_hex(32)


def configured_secret(deployment: Deployment) -> str | None:
    """The secret that the deployment's file names, if any. Raises ConfigError, see `secret`."""
    transfer = deployment.transfer
    value = _env_or_file(
        "transfer.secret_env", transfer.secret_env, "transfer.secret_file", transfer.secret_file
    )
    if value is None:
        return None
    if len(value.strip()) < MIN_LENGTH:
        key = "secret_env" if transfer.secret_env is not None else "secret_file"
        raise ConfigError(
            f"transfer.{key}: {len(value.strip())} characters — a secret needs at least "
            f"{MIN_LENGTH}; make one with: openssl rand -hex 32"
        )
    return value.strip()


def api_keys(router: RouterSection, section: str = "router.") -> tuple[ApiKey, ...]:
    """The keys that clients must send; empty if none are configured.

    `section` is the prefix of a setting's name in messages. Raises ConfigError if the keys of
    clients or operators are configured twice or unreadable, if there is no key, or if one is given
    twice.
    """
    return tuple(key for key in router_keys(router, section) if not key.is_admin)


def router_keys(router: RouterSection, section: str = "router.") -> tuple[ApiKey, ...]:
    """The keys of clients and of operators; see `api_keys`."""
    clients = _keys(
        f"{section}api_keys_env",
        router.api_keys_env,
        f"{section}api_keys_file",
        router.api_keys_file,
        is_admin=False,
    )
    operators = _keys(
        f"{section}admin_keys_env",
        router.admin_keys_env,
        f"{section}admin_keys_file",
        router.admin_keys_file,
        is_admin=True,
    )
    if router.peers and not operators:
        raise ConfigError(
            f"{section}peers: routers show each other an operator's key, and there is none; set "
            f"{section}admin_keys_file, with the same key at each router"
        )
    names = {key.name for key in (*clients, *operators) if key.name is not None}
    for name in router.shares:
        if name != OTHERS and name not in names:
            known = ", ".join(sorted(names)) or "none has a name; write NAME=KEY"
            raise ConfigError(
                f"{section}shares.{name}: no key has this name (keys: {known}); * is for all others"
            )
    values = [key.value for key in clients]
    for number, one in enumerate(operators, start=1):
        if one.value in values:
            source = "admin_keys_env" if router.admin_keys_env is not None else "admin_keys_file"
            raise ConfigError(
                f"{section}{source}: key {number} is also API key {values.index(one.value) + 1} — "
                "clients' keys must not operate; give operators keys of their own"
            )
    return (*clients, *operators)


def _keys(
    env_key: str, env: str | None, file_key: str, file: Path | None, *, is_admin: bool
) -> tuple[ApiKey, ...]:
    value = _env_or_file(env_key, env, file_key, file)
    if value is None:
        return ()
    source = env_key if env is not None else file_key
    keys = tuple(ApiKey(key.name, key.value, is_admin) for key in _parsed(value, source))
    if not keys:
        raise ConfigError(f"{source}: no key in it — put keys in, separated by commas or lines")
    values = [key.value for key in keys]
    for number, one in enumerate(values):
        if one in values[:number]:
            owner = "operator" if is_admin else "client"
            raise ConfigError(
                f"{source}: key {number + 1} is the same as key {values.index(one) + 1} — "
                f"give each {owner} a key of its own"
            )
    return keys


def engine_key(env: str) -> str:
    """The key that the engines require, from an environment variable. Raises ConfigError."""
    value = os.environ.get(env, "").strip()
    if not _KEY.fullmatch(value):
        raise ConfigError(
            f"--engine-key-env: {env!r} — this variable holds no key; export the key with which "
            "the engines were started (VLLM_API_KEY)"
        )
    return value


def tls(router: RouterSection, section: str = "router.") -> TlsFiles | None:
    """The certificate and key for https; None for http.

    Raises ConfigError if one is missing or unreadable, or if they do not belong together.
    """
    cert_key, key_key = f"{section}tls_cert_file", f"{section}tls_key_file"
    cert, key = router.tls_cert_file, router.tls_key_file
    if cert is None and key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    return _load_pair(context, cert_key, cert, key_key, key)


def engine_tls(router: RouterSection, section: str = "router.") -> ssl.SSLContext | None:
    """How the router trusts engines with https, and who it is to them; None for the system's
    authorities and no certificate.

    Raises ConfigError if a file is missing, unreadable, or does not fit the others.
    """
    ca, cert, key = (
        router.engine_tls_ca_file,
        router.engine_tls_cert_file,
        router.engine_tls_key_file,
    )
    if ca is None and cert is None and key is None:
        return None
    ca_key = f"{section}engine_tls_ca_file"
    authorities = None if ca is None else _text(ca_key, ca, secret=False)
    try:
        context = ssl.create_default_context(cadata=authorities)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigError(f"{ca_key}: {str(ca)!r} — holds no certificate; name a PEM file") from (
            error
        )
    if cert is not None or key is not None:
        prefix = f"{section}engine_tls_"
        _load_pair(context, f"{prefix}cert_file", cert, f"{prefix}key_file", key)
    return context


def _load_pair(
    context: ssl.SSLContext, cert_key: str, cert: Path | None, key_key: str, key: Path | None
) -> TlsFiles:
    """Load a certificate and its key. Raises ConfigError, see `tls`."""
    if cert is None or key is None:
        given, missing = (cert_key, key_key) if key is None else (key_key, cert_key)
        raise ConfigError(
            f"{missing}: empty — {given} is {str(cert or key)!r}; set both, or neither"
        )
    for name, path, kind in ((cert_key, cert, "CERTIFICATE"), (key_key, key, "PRIVATE KEY")):
        if f"{kind}-----" not in _text(name, path, secret=kind == "PRIVATE KEY"):
            raise ConfigError(f"{name}: {str(path)!r} — holds no {kind.lower()}; name a PEM file")
    try:
        # For an encrypted key OpenSSL would ask for a password at the terminal. It gets an empty
        # one instead.
        context.load_cert_chain(cert, key, lambda: b"")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"is not the key of {cert_key} ({str(cert)!r}); name that certificate's key"
        else:
            why = (error.reason or "unknown").replace("_", " ").lower()
            problem = f"can't be used with {str(cert)!r} ({why}); name its key, unencrypted"
        raise ConfigError(f"{key_key}: {str(key)!r} — {problem}") from error
    return TlsFiles(cert, key)


def _parsed(text: str, source: str) -> Iterator[ApiKey]:
    """The keys in a text: each is `name=key` or a bare key. A name must be a plain word, so that
    no part of a key is taken for a name."""
    plain = [_COMMENT.sub("", line) for line in text.splitlines()]
    entries = [entry.strip() for line in plain for entry in line.split(",")]
    for number, entry in enumerate(filter(None, entries), start=1):
        name, separator, value = (part.strip() for part in entry.partition("="))
        if not separator:
            name, value = "", entry
        elif not _NAME.fullmatch(name):
            raise ConfigError(
                f"{source}: key {number} has no name of letters, digits and . _ @ - before its "
                "first = — write NAME=KEY"
            )
        elif not value.strip("="):  # `name=`, or a bare key in base64
            raise ConfigError(
                f"{source}: key {number} is empty after its first = — write NAME=KEY, also for "
                "a key that itself ends in ="
            )
        if not _KEY.fullmatch(value):
            raise ConfigError(
                f"{source}: key {number} holds a space or a character that is not ASCII — "
                "make one with: openssl rand -hex 32"
            )
        yield ApiKey(name or None, value)


def _env_or_file(env_key: str, env: str | None, file_key: str, file: Path | None) -> str | None:
    """The text from one of two settings, a variable or a file; None if neither is set."""
    if env is not None and file is not None:
        raise ConfigError(f"{env_key}: {env!r} — {file_key} is set too; keep one of them")
    if env is not None:
        value = os.environ.get(env)
        if not value:
            state = "not set" if value is None else "empty"
            raise ConfigError(f"{env_key}: {env!r} — this variable is {state}; export it")
        return value
    return None if file is None else _text(file_key, file)


def _text(key: str, file: Path, *, secret: bool = True) -> str:
    """A file's text. secret: other users may neither read nor change it."""
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            found = os.fstat(opened.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{key}: {str(file)!r} — is not a regular file; name a file")
            exposed = found.st_mode & 0o027 or found.st_uid not in (0, os.getuid())
            if secret and exposed:
                raise ConfigError(
                    f"{key}: {str(file)!r} — other users may read or change it (mode "
                    f"{stat.S_IMODE(found.st_mode):o}, user {found.st_uid}); chmod 600"
                )
            return opened.read(_MOST_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"{key}: {str(file)!r} — {error.strerror}; make it readable") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key}: {str(file)!r} — not text; name a text file") from error
