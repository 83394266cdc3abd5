"""From the YAML's `tiers` section to the engines' arguments."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from disagg.config import Deployment, Role, load
from disagg.connector.offload.settings import OffloadSettings
from disagg.engine.args import engine_args
from disagg.engine.spec import EngineSpec
from disagg.errors import ConfigError
from disagg.preflight import checks
from disagg.preflight.resolved_plan import resolve


def deployment(**tiers: Any) -> Deployment:
    return Deployment.model_validate(
        {"model": {"path": "org/name"}, "router": {"port": 0}, "tiers": tiers}
    )


def transfer_config(made: Deployment, role: Role) -> dict[str, Any]:
    spec = EngineSpec(made, role, 0, "run", "/tmp/kv", True, "secret", "key")
    config: dict[str, Any] = engine_args(spec, host="127.0.0.1", engine_id="1")[
        "kv_transfer_config"
    ]
    return config


def test_without_tiers_the_handoff_is_alone() -> None:
    config = transfer_config(deployment(), "prefill")
    assert config["kv_connector"] == "DisaggConnector"
    assert config["kv_load_failure_policy"] == "recompute"


@pytest.mark.parametrize(
    ("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")]
)
def test_tiers_add_a_second_connector(role: Role, kv_role: str) -> None:
    made = deployment(
        host={"max_bytes": 1 << 30, "eviction": "arc"},
        directory={"path": "/tmp", "max_bytes": 5},
        blocks_per_chunk=2,
    )
    config = transfer_config(made, role)
    assert (config["kv_connector"], config["kv_role"]) == ("MultiConnector", kv_role)
    handoff, tiers = config["kv_connector_extra_config"]["connectors"]
    assert handoff["kv_connector"] == "DisaggConnector"
    assert handoff["kv_connector_extra_config"]["engine_name"] == f"{role}-0"
    assert (tiers["kv_connector"], tiers["kv_role"]) == ("DisaggOffloadConnector", kv_role)
    assert tiers["kv_connector_extra_config"] == {
        "host_bytes": 1 << 30,
        "eviction": "arc",
        "directory": "/tmp",
        "directory_bytes": 5,
        "directory_checksum": "keyed",
        "reset_keeps_files": False,
        "blocks_per_chunk": 2,
        "staging_bytes": 64 << 20,
        "load_deadline_s": 30.0,
        "engine_name": f"{role}-0",
    }


def test_an_object_store_is_handed_on() -> None:
    objects = {
        "url": "s3://bucket/kv",
        "region": "eu-central-1",
        "ttl_s": "7d",
        "max_bytes": "1TiB",
    }
    made = deployment(objects=objects)
    config = transfer_config(made, "prefill")
    tiers = config["kv_connector_extra_config"]["connectors"][1]["kv_connector_extra_config"]
    assert "host_bytes" not in tiers
    assert tiers["objects"] == {
        "url": "s3://bucket/kv",
        "region": "eu-central-1",
        "max_bytes": 1 << 40,
        "ttl_s": 604800.0,
        "checksum": "keyed",
        "connect_timeout_s": 2.0,
        "timeout_s": 5.0,
        "reset_keeps_objects": False,
    }
    assert OffloadSettings.model_validate(tiers).objects is not None


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    made = deployment(directory={"path": str(tmp_path / "file" / "below")})
    with pytest.raises(ConfigError) as caught:
        checks.check(made)
    (problem,) = caught.value.problems
    assert problem.startswith("tiers.directory.path: ")
    assert "name a folder that this user may write" in problem


@pytest.mark.parametrize(
    ("tiers", "key"),
    [
        ({"host": {"max_bytes": 0}}, "tiers.host.max_bytes"),
        ({"host": {"eviction": "fifo"}}, "tiers.host.eviction"),
        ({"directory": {}}, "tiers.directory.path"),
        ({"disk": {}}, "tiers.disk"),
        ({"blocks_per_chunk": 0}, "tiers.blocks_per_chunk"),
        ({"objects": {}}, "tiers.objects.url"),
        ({"objects": {"url": "ftp://host"}}, "tiers.objects.url"),
        ({"objects": {"url": "valkey://:hunter2@host"}}, "tiers.objects.url"),
        ({"objects": {"url": "valkey://:hun/ter2@host"}}, "tiers.objects.url"),
        ({"objects": {"url": "valkey://host", "password": "hunter2"}}, "tiers.objects.password"),
        ({"objects": {"url": "valkey://host", "max_bytes": 1}}, "tiers.objects"),
        ({"objects": {"url": "valkey://host", "region": "x"}}, "tiers.objects"),
        ({"objects": {"url": "s3://bucket", "endpoint": "garbage"}}, "tiers.objects.endpoint"),
        ({"objects": {"url": "s3://bucket", "timeout_s": 0}}, "tiers.objects.timeout_s"),
        ({"objects": {"url": "s3://bucket"}, "directory": {"path": "/tmp"}}, "tiers"),
    ],
)
def test_a_wrong_setting_is_named(tiers: dict[str, Any], key: str, tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(json.dumps({"model": {"path": "org/name"}, "tiers": tiers}))
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert any(problem.startswith(key) for problem in caught.value.problems)
    assert "ter2" not in str(caught.value)


def test_the_plan_shows_them() -> None:
    shown = resolve(deployment(host={"max_bytes": 7}))
    assert shown["tiers"] == {"host": {"max_bytes": 7, "eviction": "turns"}, "blocks_per_chunk": 1}
