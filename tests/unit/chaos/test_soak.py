"""The soak's deployment, its single engine's arguments, and its prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.chaos import soak
from disagg.errors import ConfigError

YAML = """
model: {path: /models/one, served_name: one}
transfer: {transports: [tcp], lease_s: 60}
"""


def test_a_deployment_of_the_users(tmp_path: Path) -> None:
    """As it is, but for leases that run out in time and are followed on one host, too, and for
    transports that are asked for."""
    file = tmp_path / "serve.yaml"
    file.write_text(YAML)
    deployment = soak._deployment(file, None)
    assert deployment.model.served_name == "one"
    assert (deployment.transfer.transports, deployment.transfer.lease_s) == (["tcp"], soak.LEASE_S)
    assert deployment.router.pairing.follow is True
    assert soak._deployment(file, ["shared_storage"]).transfer.transports == ["shared_storage"]


def test_a_deployment_that_follows_nothing(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(YAML + "router: {pairing: {follow: false}}\n")
    assert soak._deployment(file, None).router.pairing.follow is False


def test_keys_that_nobody_sends(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(YAML + "router: {api_keys_env: KEYS}\n")
    with pytest.raises(ConfigError, match=r"router\.api_keys: the soak's clients send no key"):
        soak._deployment(file, None)


def test_engine_arguments_as_options() -> None:
    args = {
        "max_model_len": 512,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "seed": None,
        "speculative_config": {"method": "ngram"},
        "served_model_name": ["a", "b"],
    }
    assert soak.as_options(args) == [
        *("--max-model-len", "512", "--enforce-eager", "--no-enable-prefix-caching"),
        *("--speculative-config", '{"method": "ngram"}', "--served-model-name", "a", "b"),
    ]


def test_prompts() -> None:
    """No longer than they may be; some begin as others do, and some clients leave."""
    plans = soak.plans(300, 0.2, longest=400)
    assert {len(plan.prompt) for plan in plans} == {3, 60, 128, 300}
    assert 30 < sum(plan.patience_s is not None for plan in plans) < 90
    long = [tuple(plan.prompt[:60]) for plan in plans if len(plan.prompt) >= 60]
    assert 10 < len(long) - len(set(long)) < 150
