"""Extension: device memory for transfers, which vLLM's memory profile does not know.

vLLM measures what the model needs, gives all the rest of `gpu_memory_utilization` to the KV cache,
and only then makes connectors. So this patch subtracts what our connectors take of each GPU
(`staging_bytes`, and what NCCL allocates for itself) from what vLLM found for the cache.

Must never change an engine without our connector, nor one on a CPU, nor what a user asked for with
`kv_cache_memory_bytes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from disagg.engine.vllm_patches.patching import Patch, logger, on_cpu

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig

Measure = Callable[[Any], list[int]]


def leave_room() -> None:
    """Change vLLM's measure of memory, in each process that may make an engine on GPUs."""
    # Not the worker's method: it is imported when a worker starts, and costs others a second.
    from vllm.v1.executor.abstract import Executor

    Executor.determine_available_memory = leaving_room(Executor.determine_available_memory)


def leaving_room(measure: Measure) -> Measure:
    """vLLM's measure of each worker's memory for the cache, minus the bytes for transfers."""
    if hasattr(measure, "leaves_room"):
        return measure  # plugins may be loaded twice

    @functools.wraps(measure)
    def leaves_room(executor: Any) -> list[int]:
        config = executor.vllm_config
        on_cpu = config.device_config.device_type == "cpu"
        taken = 0 if on_cpu else device_bytes(config.kv_transfer_config)
        # Read before `measure`, which may set it to the value that vLLM saved at an earlier start.
        by_user = config.cache_config.kv_cache_memory_bytes is not None
        available = measure(executor)
        if not taken:
            return available
        if by_user:
            logger.info(
                "kv_cache_memory_bytes is set: the %d MiB that transfers take of each GPU must be "
                "free beside it",
                taken >> 20,
            )
            return available
        logger.info("%d MiB of each GPU are left free for transfers", taken >> 20)
        return [one - taken for one in available]

    leaves_room.leaves_room = True  # type: ignore[attr-defined]
    return leaves_room


def device_bytes(transfer: KVTransferConfig | None) -> int:
    """Bytes of each GPU that the configured connectors of ours take."""
    if transfer is None or transfer.kv_connector is None:
        return 0
    settings = transfer.kv_connector_extra_config
    if transfer.kv_connector == "MultiConnector":
        return sum(device_bytes(_child(child)) for child in settings.get("connectors", []))
    if not (transfer.kv_connector_module_path or "").startswith("disagg."):
        return 0  # another connector, which must not be imported here

    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    connector: Any = KVConnectorFactory.get_connector_class(transfer)
    return int(connector.device_bytes(settings))


def _child(config: dict[str, Any]) -> KVTransferConfig:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(**config)


def _is_needed(config: VllmConfig) -> bool:
    """Whether transfers take GPU memory that only this patch keeps free."""
    if config.device_config.device_type == "cpu":
        return False
    if config.cache_config.kv_cache_memory_bytes is not None:
        return False
    return device_bytes(config.kv_transfer_config) > 0


PATCH = Patch(
    "kv_memory_headroom",
    fault="vLLM gives the GPU memory that transfers need to the KV cache, and both run out of it.",
    versions="",  # no version of vLLM has a setting for it
    report="none: connectors cannot state the memory that they take",
    until="a connector can tell vLLM's memory profile what it takes",
    apply=leave_room,
    when=lambda: not on_cpu(),
    needed=_is_needed,
)
