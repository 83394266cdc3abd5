"""What the scheduler half and the worker half of HiddenStatesConnector tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)

from disagg.connector.hidden_states.writer import Save


@dataclass
class StepWork(KVConnectorMetadata):
    """Scheduler -> worker, each step: numbers to promise, to take back, and files to write.

    A number is promised in the step that computes its request's first tokens, so before any
    answer can name its path.
    """

    promises: list[int] = field(default_factory=list)
    withdrawals: list[int] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)


@dataclass(frozen=True)
class WriterAddress(KVConnectorHandshakeMetadata):
    """Worker -> scheduler, once: what the names of this life's files are made of."""

    folder: str
    life: str
