"""A descriptor that ends calls its callback once; idle descriptors cost nothing."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from functools import partial

import psutil

from disagg.transport.host.fd_watcher import FdWatcher


def test_told_once_when_the_peer_ends() -> None:
    watch, told = FdWatcher("test-watch"), queue.SimpleQueue[str]()
    pairs = {name: socket.socketpair() for name in "abc"}
    for name, (ours, _) in pairs.items():
        watch.add(ours.fileno(), partial(told.put, name))
    pairs["b"][1].close()
    assert told.get(timeout=2) == "b"
    assert not watch.remove(pairs["b"][0].fileno())
    assert watch.remove(pairs["c"][0].fileno())
    pairs["c"][1].close()
    pairs["a"][1].sendall(b"!")
    assert told.get(timeout=2) == "a"
    time.sleep(0.1)
    assert told.empty()
    watch.close()
    for ours, theirs in pairs.values():
        ours.close()
        theirs.close()


def test_a_callback_that_fails_stops_no_other() -> None:
    def broken() -> None:
        raise ZeroDivisionError

    watch, told = FdWatcher("test-watch"), threading.Event()
    pairs = [socket.socketpair() for _ in range(2)]
    watch.add(pairs[0][0].fileno(), broken)
    watch.add(pairs[1][0].fileno(), told.set)
    pairs[0][1].close()
    time.sleep(0.1)
    pairs[1][1].close()
    assert told.wait(2)
    watch.close()
    for ours, _ in pairs:
        ours.close()


def test_the_thread_sleeps_and_ends() -> None:
    watch = FdWatcher("test-watch-idle")
    pairs = [socket.socketpair() for _ in range(20)]
    for ours, _ in pairs:
        watch.add(ours.fileno(), lambda: None)
    (thread,) = [one for one in threading.enumerate() if one.name == "test-watch-idle"]
    time.sleep(0.1)
    before = _switches(thread)
    time.sleep(0.5)
    assert _switches(thread) - before <= 1
    descriptors = psutil.Process().num_fds()
    watch.close()
    thread.join(2)
    assert not thread.is_alive()
    assert psutil.Process().num_fds() == descriptors - 2
    watch.add(pairs[0][0].fileno(), lambda: None)  # too late, and no error
    for pair in pairs:
        for one in pair:
            one.close()


def _switches(thread: threading.Thread) -> int:
    """How often the thread has gone to sleep."""
    with open(f"/proc/{os.getpid()}/task/{thread.native_id}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("voluntary"))
