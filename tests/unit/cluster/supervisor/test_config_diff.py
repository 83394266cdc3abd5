"""Which changes of a file are refused, and which engines a change replaces."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.cluster.supervisor.config_diff import is_outdated, refused
from disagg.config import Deployment, SeveralDeployments


def deployment(**sections: Any) -> Deployment:
    return Deployment.model_validate({"model": {"path": "/models/a"}, **sections})


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"name": "other"}, "name:"),
        ({"model": {"path": "/models/b"}}, "model.path:"),
        ({"router": {"port": 9000}}, "router.port:"),
        ({"router": {"pairing": {"decode": "round_robin"}}}, "router.pairing.decode:"),
        ({"transfer": {"secret_env": "S"}}, "transfer.secret_env:"),
        ({"transfer": {"storage": {"path": "/elsewhere"}}}, "transfer.storage.path:"),
        ({"transfer": {"strict": True}}, "transfer.strict:"),
    ],
)
def test_refused_with_its_path(sections: dict[str, Any], path: str) -> None:
    (line,) = refused(deployment(), deployment(**sections))
    assert line.startswith(path)
    assert "->" in line
    assert "stop the deployment" in line


@pytest.mark.parametrize(
    ("sections", "old"),
    [
        ({}, ()),
        ({"decode": {"replicas": 3}}, ()),
        ({"decode": {"autoscale": {"max_replicas": 3}}}, ()),
        ({"engine": {"max_restarts": 1, "drain_timeout_s": 5}}, ()),
        ({"decode": {"args": {"max_num_seqs": 8}}}, ("decode",)),
        ({"prefill": {"resources": {"num_cpus": 2}}}, ("prefill",)),
        ({"engine": {"env": {"A": "b"}}}, ("prefill", "decode")),
        ({"tiers": {"host": {}}}, ("prefill", "decode")),
        ({"transfer": {"lease_s": 5}}, ("prefill", "decode")),
    ],
)
def test_outdated_engines(sections: dict[str, Any], old: tuple[str, ...]) -> None:
    before, after = deployment(), deployment(**sections)
    assert refused(before, after) == []
    assert is_outdated(before, after, "prefill") == ("prefill" in old)
    assert is_outdated(before, after, "decode") == ("decode" in old)


def several(*entries: dict[str, Any]) -> Deployment:
    return SeveralDeployments.model_validate({"deployments": list(entries)}).each()[0]


def test_refused_beside_other_deployments() -> None:
    chat: dict[str, Any] = {"name": "chat", "model": {"path": "/models/a"}}
    code: dict[str, Any] = {"name": "code", "model": {"path": "/models/b"}}
    limited = code | {"limits": {"max_queued": 3}}
    assert refused(several(chat, code), several(chat, code)) == []
    (line,) = refused(several(chat, code), several(chat, limited))
    assert line.startswith("deployments.code.limits.max_queued: 1024 -> 3")
    (line,) = refused(several(chat), several(chat, code))
    assert line.startswith("deployments.code: empty -> {")
    assert refused(several(chat, code), several(chat | {"decode": {"replicas": 2}}, code)) == []
