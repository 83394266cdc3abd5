"""Another user, in a process of its own; in a module of its own, so that a child can import it."""

from __future__ import annotations

import os

from transport import caches
from transport.caches import Shape

from disagg.transport.one_sided.process_memory import ProcessMemoryReceiver

REFUSED = 17


def look_as_another_user(offer: bytes, shape: Shape) -> None:
    """Exit with REFUSED if the offer is of use as root and of none as nobody."""
    receiver = ProcessMemoryReceiver(caches.make(shape, None))
    assert receiver.open(offer)
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    raise SystemExit(1 if receiver.open(offer) else REFUSED)
