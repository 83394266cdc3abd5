"""Messages between the scheduler and the worker half of HiddenStatesConnector."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from disagg.connector.hidden_states.writer import Save


@dataclass
class StepWork(KVConnectorMetadata):
    """Scheduler -> worker, each step. promises: numbers whose files become pending. withdrawals:
    numbers whose files will not be written. saves: files to write.

    A number is promised in the step that computes its request's first tokens, so before any answer
    can contain its path.
    """

    promises: list[int] = field(default_factory=list)
    withdrawals: list[int] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass(frozen=True)
class WriterAddress(KVConnectorHandshakeMetadata):
    """Worker -> scheduler, once: the folder and the life that file names contain."""

    folder: str
    life: str
