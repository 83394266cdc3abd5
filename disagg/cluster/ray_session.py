"""Joins a running Ray cluster, or runs a private Ray on this machine until this process ends.

It joins if RAY_ADDRESS is set, as it is within `ray job submit`. A private Ray has ports, a folder
and processes of its own, and `stop` ends and removes all of them. It listens on loopback alone, and
serves holders of this user's token alone, since whoever reaches a Ray may run code there. A joined
cluster must never be stopped.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from disagg.cluster.run_folder import RunFolder, sweep
from disagg.cluster.signals import Interrupted
from disagg.errors import ConfigError, StartupError
from disagg.private_files import PrivateFolder, read_own_file

logger = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 80 << 20  # disagg stores nothing in it; Ray's minimum is 75 MiB
STOP_S = 3.0
SLOW_START = "timed out during startup"  # what Ray says when a node takes more than its 30 s
ADDRESS = "address"  # the file with a private Ray's address, in its folder
LOOPBACK = "127.0.0.1"
_MOST_BYTES = 256
_PREFIX = "r-"  # short, for MAX_SOCKET_PATH
_LISTENS = "0A"  # a socket's state in /proc/net/tcp
# A Unix socket's path has at most 107 bytes. Ray appends up to `RAYS_PART` to the folder's path.
MAX_SOCKET_PATH = 107
RAYS_PART = "/session_2026-11-20_22-00-00_000000_1234567/sockets/dash_MetricsHead"

PRIVATE_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run disagg` would start workers by uv
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
AUTH_MODE, AUTH_TOKEN, AUTH_TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


@dataclass
class RaySession:
    """A connection to Ray. private: this process started the cluster, and nobody else uses it."""

    private: bool
    node_id: str
    dashboard_url: str | None
    _folder: RunFolder | None

    def stop(self) -> None:
        """Leave the cluster; end and remove a private one. Our actors end in both cases."""
        import ray

        ours = _processes(self._folder.path) if self._folder else []
        ray.shutdown()
        _end(ours)
        if self._folder:
            self._folder.remove()


def connect(
    namespace: str, after_init: Callable[[], None], *, without_token: bool = False
) -> RaySession:
    """Join or start Ray. `after_init` runs right after `ray.init`, which sets signal handlers.

    without_token: the Ray to join may serve a network without a token. Raises ConfigError if it
    does and must not, StartupError if Ray does not start.
    """
    os.environ |= {name: value for name, value in PRIVATE_ENV.items() if name not in os.environ}
    joined = bool(os.environ.get("RAY_ADDRESS"))
    if joined and not without_token:
        _refuse_without_token(os.environ["RAY_ADDRESS"])
    if not joined:
        _use_loopback()
        _use_tokens()
        _check_token_file()
    try:
        context, folder = _begun(namespace, joined)
    except SystemExit as error:  # from Ray's handler of SIGTERM during `ray.init`
        raise Interrupted(signal.SIGTERM) from error
    except Exception as error:
        raise StartupError(f"Ray did not start: {_first_line(error)}") from error
    finally:
        after_init()
    return RaySession(
        private=not joined,
        node_id=context.address_info["node_id"],
        dashboard_url=f"http://{context.dashboard_url}" if context.dashboard_url else None,
        _folder=folder,
    )


def _begun(namespace: str, joined: bool) -> tuple[Any, RunFolder | None]:
    """A private Ray that is slow gets a second try: the first has warmed the disk's cache."""
    try:
        return _tried(namespace, joined)
    except Exception as error:
        if joined or SLOW_START not in str(error):
            raise
    logger.warning("Ray did not start within its 30 s; disagg starts it once more")
    return _tried(namespace, joined)


def _tried(namespace: str, joined: bool) -> tuple[Any, RunFolder | None]:
    """Ray's context and a private Ray's folder. If it fails, nothing is left behind."""
    folder = None if joined else _private_folder()
    try:
        with _temp_folder(folder), _without_hangup(), _in_groups_of_their_own():
            context = _init(namespace, folder)
        if folder:
            folder.path.chmod(0o700)  # Ray has opened it for everybody
            folder.folder.write_bytes(ADDRESS, context.address_info["gcs_address"].encode())
            _check_token_file()  # Ray makes the token if there is none
    except BaseException:
        if folder:
            _end(_processes(folder.path))
            folder.remove()
        raise
    return context, folder


@contextmanager
def _without_hangup() -> Iterator[None]:
    """Block SIGHUP. Processes that are started meanwhile never get one, so that a lost terminal
    ends a deployment in order; this process gets it afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _temp_folder(folder: RunFolder | None) -> Iterator[None]:
    """Set TMPDIR, so that a private Ray and its engines put temporary files into the folder."""
    before = os.environ.get("TMPDIR")
    if folder:
        os.environ["TMPDIR"] = str(folder.path)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = before


@contextmanager
def _in_groups_of_their_own() -> Iterator[None]:
    """Start Ray's processes outside this process's group. Supervisors and `make` signal the whole
    group: Ray would then end first, while the engines still need it to end in order."""
    from ray._private import services

    plain = services.ConsolePopen

    class InItsOwnGroup(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, process_group=0, **options)

    services.ConsolePopen = InItsOwnGroup  # type: ignore[misc]
    try:
        yield
    finally:
        services.ConsolePopen = plain  # type: ignore[misc]


def _init(namespace: str, folder: RunFolder | None) -> Any:
    import ray

    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if folder is None:
        return ray.init(namespace=namespace, **quiet)
    return ray.init(
        address="local",
        namespace=namespace,
        include_dashboard=True,
        dashboard_host=LOOPBACK,
        _node_ip_address=LOOPBACK,
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder.path),
        **quiet,
    )


def token_file() -> Path | None:
    """The file with the token of Ray's dashboard; None if the dashboard needs no token."""
    if os.environ.get(AUTH_MODE, "token") != "token" or AUTH_TOKEN in os.environ:
        return None
    path = Path(os.environ.get(AUTH_TOKEN_PATH, "~/.ray/auth_token")).expanduser()
    return path if path.is_file() else None


def _use_loopback() -> None:
    """Take 127.0.0.1 for the node's address, in this process and its children. Otherwise Ray takes
    the host's, even if it is given another, and listens on all addresses. Ray has this setting for
    desktops, whose firewalls would ask."""
    from ray._private import ray_constants

    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False


def _use_tokens() -> None:
    """Serve holders of this user's token alone, whatever the environment says."""
    if os.environ.get(AUTH_MODE, "token").lower() != "token":
        logger.warning("%s is ignored: a private Ray asks for a token", AUTH_MODE)
    os.environ[AUTH_MODE] = "token"
    _read_environment()


def _read_environment() -> None:
    """Ray reads the environment when it is imported, and then never again."""
    from ray._raylet import Config  # type: ignore[attr-defined]

    Config.initialize("")


def _refuse_without_token(address: str) -> None:
    """Raise ConfigError for an address on a network where Ray's tokens are switched off."""
    host = address.rpartition("://")[2].rpartition(":")[0].strip("[]")
    on_network = host not in ("", "localhost", "::1") and not host.startswith("127.")
    if on_network and os.environ.get(AUTH_MODE, "").lower() == "disabled":
        raise ConfigError(
            f"{AUTH_MODE}: 'disabled' — whoever reaches Ray at {address} may run code on its "
            f"machines; set {AUTH_MODE}=token on all nodes (ray get-auth-token --generate), or "
            "ray.without_token: true in the file if nobody else reaches it"
        )


def _check_token_file() -> None:
    """Ray's token lets its holder run code as this user. Ray makes the file readable for others,
    so this user's own is closed here. Raises ConfigError for another user's."""
    path = token_file()
    if path is None:
        return
    found = path.stat()
    if found.st_uid != os.getuid():
        raise ConfigError(
            f"{AUTH_TOKEN_PATH}: {str(path)!r} — belongs to user {found.st_uid}; name a file of "
            "your own"
        )
    if found.st_mode & 0o077:
        path.chmod(0o600)


def private_addresses() -> list[str]:
    """The addresses of this user's private Rays that run on this machine now."""
    parent = _parent().make("TMPDIR")
    sweep(parent, _PREFIX)
    found = []
    for folder in sorted(parent.path.glob(f"{_PREFIX}*")):
        try:
            # Ray opens the folder for everybody whenever it likes; its parent lets nobody in.
            with parent.enclosed(folder.name).opened() as opened:
                address = read_own_file(ADDRESS, _MOST_BYTES, opened).decode()
        except (OSError, UnicodeDecodeError) as error:
            logger.info("%s is no Ray of ours: %s", folder, error)
            continue
        if _is_ours(address):
            found.append(address)
    return found


def _is_ours(address: str) -> bool:
    """Whether a process of this user listens at this loopback address: a token is sent there, and
    the answers may run code here."""
    host, _, port = address.rpartition(":")
    if host != LOOPBACK or not port.isdigit():
        return False
    ipv4 = socket.inet_aton(host)[::-1].hex().upper()
    addresses = {ipv4, f"{0:016X}FFFF0000{ipv4}", f"{0:08X}", f"{0:032X}"}
    owners = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            _, local, _, state, *_, uid = line.split()[:8]
            at, _, at_port = local.partition(":")
            if state == _LISTENS and at in addresses and int(at_port, 16) == int(port):
                owners.add(int(uid))
    return owners == {os.getuid()}


@contextmanager
def visit(address: str, *, private: bool) -> Iterator[None]:
    """A connection to a running Ray. private: one of `private_addresses`.

    Raises StartupError if none answers at the address.
    """
    import ray

    if private:
        _use_loopback()

    # A private Ray requires the token that it made for this user.
    wanted = PRIVATE_ENV | ({"RAY_AUTH_MODE": "token"} if token_file() else {})
    os.environ |= {name: value for name, value in wanted.items() if name not in os.environ}
    _read_environment()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise StartupError(f"no Ray answers at {address}: {_first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _private_folder() -> RunFolder:
    parent = _parent().make("TMPDIR")
    sweep(parent, _PREFIX)
    return RunFolder(parent, _PREFIX, _name()).guarded()


def _parent() -> PrivateFolder:
    """The parent folder of this user's private Rays."""
    own = f"disagg-ray-{os.getuid()}"
    parent = Path(tempfile.gettempdir(), own).absolute()
    fits = len(f"{parent}/{_PREFIX}{_name()}{RAYS_PART}") <= MAX_SOCKET_PATH
    return PrivateFolder(parent if fits else Path("/tmp", own), default=True)


def _name() -> str:
    return os.urandom(3).hex()


def _processes(folder: Path) -> list[psutil.Process]:
    """Our child processes whose command line names the folder, and all their descendants."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        try:
            if any(str(folder) in word for word in child.cmdline()):
                found += [child, *child.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    return found


def _end(processes: list[psutil.Process]) -> None:
    """Wait for processes that are ending, and kill those that remain after `STOP_S`."""
    _, left = psutil.wait_procs(processes, timeout=STOP_S)
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=STOP_S)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
