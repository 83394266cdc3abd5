"""A small process that outlives an engine's actor by seconds and cleans up after it.

    python guardian.py PID FOLDER [--detach] [--folder-alone]

The guardian waits until process PID, the actor, has ended in any way (SIGKILL included). Then it
ends every process of the actor's process group, which are vLLM's processes. It removes FOLDER
(vLLM's sockets), and the shared-memory segments that the group made and no process uses.

Ray kills the process group of a dead worker, too, but not in every case. Then neither Ray nor vLLM
removes the segments. The guardian runs outside the group, in a session of its own. It uses only the
standard library and imports nothing of disagg, so it takes 10 MB. It must never signal a process
outside the group, nor unlink a segment that another process has mapped.

With --folder-alone it removes the folder, and does nothing else: a run's folder goes with the
process of `disagg serve`.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

POLL_MS = 1000
TERM_GRACE_S = 2.0
SHM = Path("/dev/shm")
# Shared memory and semaphores of Python, torch and NCCL. Ray's object store is not among them.
SEGMENT_PREFIXES = ("psm_", "sem.mp-", "torch_", "nccl-")
# vLLM's ranks on CPUs: PORT-GROUP-[RANKS]-cpushm_RANK.
CPU_RANKS = re.compile(r"\d+-.+-cpushm_\d+")


def watch(pid: int, folder: Path) -> None:
    """Wait for `pid`, then clean up."""
    segments: set[str] = set()
    seen: set[str] = set()
    poller = select.poll()
    try:
        poller.register(os.pidfd_open(pid), select.POLLIN)
        while not poller.poll(POLL_MS):
            listing = _listing()
            # Reading the maps of a torch process is slow: do it only when a segment is new.
            if listing - seen:
                segments |= {name for member in _group(pid) for name in _mapped(member)}
            seen = listing
    except ProcessLookupError:
        pass  # it ended before we looked
    end_group(pid)
    _unlink(segments)
    shutil.rmtree(folder, ignore_errors=True)


def watch_folder(pid: int, folder: Path) -> None:
    """Wait for `pid`, then remove the folder."""
    poller = select.poll()
    with contextlib.suppress(ProcessLookupError):
        poller.register(os.pidfd_open(pid), select.POLLIN)
        poller.poll()
    shutil.rmtree(folder, ignore_errors=True)


def end_group(pgid: int) -> None:
    """Send SIGTERM, then SIGKILL after `TERM_GRACE_S`.

    Returns when the group is empty, or `TERM_GRACE_S` after SIGKILL.
    """
    _signal(pgid, signal.SIGTERM)
    deadline = time.monotonic() + TERM_GRACE_S
    while any(_group(pgid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal(pgid, signal.SIGKILL)
    deadline = time.monotonic() + TERM_GRACE_S
    while any(_group(pgid)) and time.monotonic() < deadline:
        time.sleep(0.05)


def wait_gone(guardian_pid: int, pgid: int) -> None:
    """Wait until the guardian, a process of the same node, has cleaned up.

    The guardian itself may have been killed. So this function ends what is left of the group.
    """
    deadline = time.monotonic() + 3 * TERM_GRACE_S
    while Path("/proc", str(guardian_pid)).exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if any(_group(pgid)):
        end_group(pgid)


def _signal(pgid: int, signum: signal.Signals) -> None:
    # The kernel does not reuse a group's number while a member lives. An empty group's number may
    # belong to other processes, so it must not be signalled.
    if any(_group(pgid)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pgid, signum)


def _group(pgid: int) -> Iterator[int]:
    """Ids of the living processes (no zombies) of a process group."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue  # gone meanwhile
        state, _, group = stat.rpartition(")")[2].split()[:3]
        if int(group) == pgid and state not in "ZX":
            yield int(entry)


def _listing() -> set[str]:
    return {name for name in os.listdir(SHM) if _is_segment(name)}


def _is_segment(name: str) -> bool:
    return name.startswith(SEGMENT_PREFIXES) or CPU_RANKS.fullmatch(name) is not None


def _mapped(pid: int) -> set[str]:
    """Names of the shared-memory segments that a process has mapped."""
    try:
        maps = Path("/proc", str(pid), "maps").read_text()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/dev/shm/" in line)
    names = {path.removeprefix("/dev/shm/") for path in paths}
    return {name for name in names if _is_segment(name)}


def _unlink(segments: set[str]) -> None:
    left = segments & _listing()
    if not left:
        return
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    in_use = {name for pid in pids for name in _mapped(pid)}
    for name in left - in_use:
        (SHM / name).unlink(missing_ok=True)


def spawn(folder: Path, *, folder_alone: bool = False) -> int:
    """Start a guardian for the calling process. Returns the guardian's process id.

    Ray kills the direct children of a worker that exits, so the guardian is a grandchild.
    """
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(folder)]
    command += ["--detach", *(["--folder-alone"] if folder_alone else [])]
    launcher = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return int(launcher.stdout)


def _detach() -> None:
    """Continue in a grandchild with a session of its own; print its process id."""
    child = os.fork()
    if child:
        print(child, flush=True)
        os._exit(0)
    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(silence, descriptor)


if __name__ == "__main__":
    if "--detach" in sys.argv[3:]:
        _detach()
    watches = watch_folder if "--folder-alone" in sys.argv[3:] else watch
    watches(int(sys.argv[1]), Path(sys.argv[2]))
