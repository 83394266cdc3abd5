"""What is there to be copied: each deployment is read, and fits the machines asked for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg import config

ROOT = Path(__file__).parents[2]
MANIFESTS = sorted((ROOT / "examples/kuberay").glob("*.yaml"))
DEPLOYMENTS = [
    *sorted((ROOT / "serve_configs").glob("*.yaml")),
    ROOT / "docker/serve.yaml",
    ROOT / "examples/two_models.yaml",
]


def documents(path: Path) -> dict[str, dict[str, Any]]:
    """A manifest's parts, by kind."""
    return {part["kind"]: part for part in yaml.safe_load_all(path.read_text())}


def cluster_of(path: Path) -> dict[str, Any]:
    parts = documents(path)
    spec: dict[str, Any] = (
        parts["RayJob"]["spec"]["rayClusterSpec"]
        if "RayJob" in parts
        else parts["RayCluster"]["spec"]
    )
    return spec


@pytest.mark.parametrize("path", DEPLOYMENTS, ids=lambda path: path.name)
def test_deployments_are_read(path: Path) -> None:
    assert all(deployment.model.served_name for deployment in config.load_all(path))


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("Makefile", "else\nUV_CONFIG := --no-config\nendif"),
        ("docker/Dockerfile.cuda", "uv pip install --no-config .* -r pyproject.toml --extra gpu"),
    ],
)
def test_gpus_get_what_models_that_see_need(path: str, line: str) -> None:
    """Our settings for uv leave torchvision out, for CPUs."""
    assert re.search(line, (ROOT / path).read_text())


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_pods_are_consistent(path: Path) -> None:
    spec = cluster_of(path)
    head = spec["headGroupSpec"]["template"]
    workers = [group["template"] for group in spec["workerGroupSpecs"]]
    images = {pod["spec"]["containers"][0]["image"] for pod in (head, *workers)}
    assert images == {"disagg:cuda" if "gpu" in path.name else "disagg:cpu"}
    service = documents(path)["Service"]["spec"]
    assert service["selector"].items() <= head["metadata"]["labels"].items()
    ports = {port["name"] for port in head["spec"]["containers"][0]["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports
    for pod in (head, *workers):
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        mounts = {mount["name"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
        assert mounts == volumes
    ray = re.search(r'"ray\[default\]==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert ray is not None
    assert spec["rayVersion"] == ray[1]


@pytest.mark.parametrize("path", [p for p in MANIFESTS if "rayjob" in p.name], ids=lambda p: p.name)
def test_a_jobs_engines_fit_its_pods(path: Path, tmp_path: Path) -> None:
    parts = documents(path)
    ((name, text),) = parts["ConfigMap"]["data"].items()
    assert parts["RayJob"]["spec"]["entrypoint"] == f"disagg serve /deployment/{name}"
    file = tmp_path / name
    file.write_text(text)
    deployment = config.load(file)
    (group,) = cluster_of(path)["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    for pool in (deployment.prefill, deployment.decode):
        assert pool.resources.num_cpus <= limits["cpu"]
        assert pool.resources.num_gpus <= limits.get("nvidia.com/gpu", 0)
    assert group["replicas"] == deployment.prefill.replicas + deployment.decode.replicas
    assert deployment.router.host == "0.0.0.0"
    (port,) = [p["port"] for p in parts["Service"]["spec"]["ports"] if p["name"] == "openai"]
    assert port == deployment.router.port
