from __future__ import annotations

import os
import signal

from unit.identity.processes import dead_owner

from disagg.identity import process


def test_who_is_dead() -> None:
    me = process.name()
    machine, pid, started = me.split("-")
    assert process.is_dead(me) is False
    assert process.is_dead(f"{machine}-{pid}-{int(started) + 1}") is True, "the number was reused"
    assert process.is_dead(dead_owner()) is True
    for strange in ("", "a-b", "a-b-c-d", f"other-{pid}-{started}", f"{machine}-x-1"):
        assert process.is_dead(strange) is None


def test_after_a_fork_it_is_another_owner() -> None:
    process.name()
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        os.write(write_end, process.name().encode())
        os.kill(os.getpid(), signal.SIGKILL)
    name = os.read(read_end, 100).decode()
    assert name != process.name()
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert process.is_dead(name) is True, "it has ended, though nobody has waited for it"
    os.waitpid(child, 0)
    assert process.is_dead(name) is True
    os.close(read_end)
    os.close(write_end)
