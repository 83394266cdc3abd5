"""A connector that moves nothing: it records every call, and returns configured values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.forward_context import ForwardContext
from vllm.v1.kv_cache_interface import KVCacheConfig

from disagg.vllm_compat.transfers import KVConnectorTransferResults


class Call(NamedTuple):
    """One call: its name, its arguments in brief, and the metadata that was bound then."""

    name: str
    arguments: tuple[Any, ...]
    bound: str | None


class Broken(Exception):
    """Raised by a forward pass, or by the spy if configured."""


@dataclass(frozen=True)
class Metadata(KVConnectorMetadata):
    """Of one step."""

    name: str


@dataclass(frozen=True)
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Of one step."""

    name: str

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        return self


@dataclass
class Answers:
    """What the spy returns by default."""

    get_transfer_results: KVConnectorTransferResults = field(
        default_factory=KVConnectorTransferResults
    )
    get_finished: tuple[set[str], set[str]] = field(default_factory=lambda: (set(), set()))
    """The same, as vLLM before 0.30 asks for it."""
    get_block_ids_with_load_errors: set[int] = field(default_factory=set)
    get_kv_connector_stats: KVConnectorStats | None = None
    get_kv_connector_kv_cache_events: object = None
    build_connector_worker_meta: WorkerMetadata | None = None


def brief(argument: Any) -> Any:
    """Enough of an argument to tell two apart, without object identities."""
    if isinstance(argument, ForwardContext):
        return f"forward context, attn_metadata {argument.attn_metadata!r}"
    if isinstance(argument, torch.Tensor):
        return f"tensor {argument.data_ptr():#x}"
    if isinstance(argument, set | frozenset):
        return tuple(sorted(argument))
    if isinstance(argument, dict):
        return tuple((name, brief(value)) for name, value in argument.items())
    return getattr(argument, "__name__", repr(argument))


class Spy(KVConnectorBase_V1):
    """A recorder with the whole worker side of vLLM's interface."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole = KVConnectorRole.WORKER,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config or KVCacheConfig(1, [], []))
        self.calls: list[Call] = []
        self.answers = Answers()
        self.raises: set[str] = set()

    def note(self, name: str, *arguments: Any) -> None:
        """Write down a call, or whatever else has its place among them."""
        bound = self._connector_metadata
        self.calls.append(Call(name, arguments, getattr(bound, "name", None)))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    # The scheduler side; never called.

    def get_num_new_matched_tokens(self, *args: Any) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, *args: Any) -> None: ...

    def build_connector_meta(self, *args: Any) -> KVConnectorMetadata:
        return Metadata("")


def _recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def recorded(spy: Spy, *args: Any, **kwargs: Any) -> Any:
        spy.note(name, *map(brief, args), *((key, brief(value)) for key, value in kwargs.items()))
        if name in spy.raises:
            raise Broken(name)
        result = original(spy, *args, **kwargs)
        return getattr(spy.answers, name, result)

    return recorded


# Every public method, also those that nobody is to call. `has_connector_metadata` only looks.
for _name, _method in inspect.getmembers(Spy, inspect.isfunction):
    if not _name.startswith("_") and _name not in ("note", "has_connector_metadata"):
        setattr(Spy, _name, _recording(_name, _method))


def spy_config(role: Any = "kv_both") -> VllmConfig:
    """vLLM's defaults and no model."""
    transfer = KVTransferConfig(kv_connector="Spy", kv_connector_module_path=__name__, kv_role=role)
    return VllmConfig(kv_transfer_config=transfer)
