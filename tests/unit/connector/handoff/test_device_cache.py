"""What the connector decides where caches are on a device, with host memory in its place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transport.host_device import COMPILER, HostDevice, HostStream, OnDevice
from unit.connector.modelless import BLOCK, PREFILL, Engine, answer, run

from disagg.connector import kv_cache_layout
from disagg.errors import ConfigError, TransferError
from disagg.transport.deadline import Event
from disagg.transport.device import staging

pytestmark = [
    pytest.mark.usefixtures("distributed"),
    pytest.mark.skipif(COMPILER is None, reason="needs g++ to run the kernel on the host"),
]

PROMPT = list(range(5 * BLOCK + 7))
STAGING = 1 << 20


class Device(HostDevice):
    """A device whose model is in the middle of a step until `step_ends`."""

    def __init__(self) -> None:
        super().__init__()
        self.step_ends, self.fences = threading.Event(), 0
        self._models = HostStream()
        self._models.add(self.step_ends.wait)

    def model_fence(self) -> Event:  # type: ignore[override]
        self.fences += 1
        return self._models.record()


class BrokenDevice(Device):
    def model_fence(self) -> Event:  # type: ignore[override]
        raise TransferError("an event on the model's stream: lost", reason="device")


Start = Callable[..., tuple[Engine, Device]]


@pytest.fixture
def start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts engines whose caches are on a device of their own; ends them, and looks behind."""
    started: list[tuple[Engine, Device]] = []
    block_cache = kv_cache_layout.block_cache
    monkeypatch.setattr(
        kv_cache_layout, "block_cache", lambda *args: OnDevice(list(block_cache(*args).regions))
    )

    def start(role: str, device: Device, **extra: Any) -> tuple[Engine, Device]:
        monkeypatch.setattr(staging, "open_device", lambda cache: device)
        settings = {"storage_path": str(tmp_path), "staging_bytes": STAGING, "lease_s": 60.0}
        config = {
            "kv_connector": "DisaggConnector",
            "kv_connector_module_path": "disagg.connector",
            "kv_role": role,
            "kv_connector_extra_config": {**settings, **extra},
        }
        started.append((Engine(model, config), device))
        return started[-1]

    yield start
    for engine, device in started:
        assert 0 < device.memory_in_use <= STAGING
        engine.close()
        assert device.memory_in_use == 0


def prefilled(producer: Engine) -> dict[str, Any]:
    """The params of a prompt whose blocks are kept."""
    first = producer.add(PROMPT, 1, PREFILL)
    run([producer], lambda: first in producer.finished)
    producer.step()  # the worker hears of it one step later
    return producer.params[first]


@pytest.mark.parametrize("transport", ["nccl", "tcp", "shared_storage"])
def test_no_load_writes_before_the_models_stream_is_past(start: Start, transport: str) -> None:
    producer, _ = start("kv_producer", Device(), transports=[transport])
    consumer, device = start("kv_consumer", Device(), transports=[transport])
    second = consumer.add(PROMPT, 3, prefilled(producer))
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        consumer.step()
        assert consumer.untouched(but=[])
    assert second not in consumer.finished
    assert device.fences == 1
    device.step_ends.set()
    run([producer, consumer], lambda: second in consumer.finished)
    assert consumer.answers[second] == answer(PROMPT, 3)
    assert not any(output.failed_recving for output in consumer.seen)


def test_a_device_that_fails_fails_loads_alone(start: Start) -> None:
    producer, _ = start("kv_producer", Device(), transports=["tcp"])
    consumer, _ = start("kv_consumer", BrokenDevice(), transports=["tcp"])
    second = consumer.add(PROMPT, 3, prefilled(producer))
    run([producer, consumer], lambda: second in consumer.finished and producer.is_idle())
    assert consumer.answers[second] == answer(PROMPT, 3)
    assert [o.failed_recving for o in consumer.seen if o.failed_recving] == [{second}]


def test_too_little_staging_memory_is_named(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"transfer\.staging_bytes: 100 — at least \d+"):
        start("kv_consumer", Device(), staging_bytes=100)
