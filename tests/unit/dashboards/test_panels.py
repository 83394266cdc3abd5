"""The metrics and labels of all panels are emitted, by both sources of metrics."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import disagg
from disagg.dashboards import grafana
from disagg.dashboards.panels import VIA, rows
from disagg.router.telemetry.engine_metrics import OF_VLLM
from disagg.router.telemetry.metrics import RouterMetrics

SELECTOR = re.compile(r'\{__name__=~"\$\{via\}([^"]+)", deployment=~"\$deployment"([^}]*)\}')
# The suffixes of a family's samples.
SAMPLES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}
OF_ENGINES = {"engine", "role"}  # the router adds these to what engines emit


def asked() -> Iterator[tuple[str, set[str]]]:
    """The name patterns that a panel queries, and the labels that each query uses."""
    for panel in (panel for row in rows().values() for panel in row):
        for query in panel.queries:
            kept = {label for by in re.findall(r" by \((.+?)\)", query.expr)
                    for label in by.split(", ")}  # fmt: skip
            assert set(re.findall(r"\{\{(\w+)\}\}", query.legend)) <= kept, query
            selectors = SELECTOR.findall(query.expr)
            assert len(selectors) == query.expr.count("__name__") > 0, query
            for pattern, where in selectors:
                yield pattern, kept | set(re.findall(r'(\w+)=~?"', where))


def emitted() -> dict[str, set[str]]:
    """The labels of all samples of the router, of our connector and of vLLM, by their names."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    families = [
        *of_router(),
        ("disagg_router_engine_up", "gauge", OF_ENGINES),
        *of_source(Path(disagg.__file__).parent / "connector/handoff/metrics.py"),
        *of_source(Path(vllm.origin).parent / "v1/metrics/loggers.py"),
    ]
    return {
        name.removesuffix("_total") + ending: labels | ({"le"} if ending == "_bucket" else set())
        for name, kind, labels in families
        for ending in SAMPLES[kind]
    }


def of_router() -> Iterator[tuple[str, str, set[str]]]:
    for metric in vars(RouterMetrics()).values():
        for family in getattr(metric, "describe", list)():
            yield family.name, family.type, set(metric._labelnames)


def of_source(path: Path) -> Iterator[tuple[str, str, set[str]]]:
    """Name, kind and labels of the metrics in a file of vLLM, which is not imported."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        kind = re.search("counter|gauge|histogram", ast.unparse(node.func))
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        name = given.get("name", node.args[0] if node.args else None)
        if kind and isinstance(name, ast.Constant) and isinstance(name.value, str):
            parts = [*node.args[2:], *([given["labelnames"]] if "labelnames" in given else [])]
            constants = (inner for part in parts for inner in ast.walk(part))
            labels = {str(c.value) for c in constants if isinstance(c, ast.Constant)}
            yield name.value, kind.group(), labels | OF_ENGINES


def test_panels_use_only_emitted_metrics() -> None:
    samples = emitted()
    assert {"disagg_handoffs_total", "vllm:kv_cache_usage_perc"} <= set(samples)
    assert samples["disagg_handoffs_total"] == {"transport", "outcome", *OF_ENGINES}
    found = list(asked())
    assert len(found) > 30
    for pattern, labels in found:
        for via in VIA.values():
            ray = via == "ray_"
            names = {f"ray_{name.replace(':', '_')}" if ray else name: name for name in samples}
            (name,) = (shown for shown in names if re.fullmatch(via + pattern, shown))
            assert labels <= samples[names[name]], (name, labels)


def test_the_router_passes_on_vllms_metrics_of_the_panels() -> None:
    for pattern, _ in asked():
        name = pattern.replace("[:_]", ":")
        if name.startswith("vllm:"):
            assert re.sub("_(total|bucket|sum|count)$", "", name) in OF_VLLM


def test_the_file_matches_the_panels() -> None:
    command = "python -m disagg.dashboards.grafana"
    assert grafana.FILE.read_text("utf-8") == grafana.text(), f"write it again: {command}"
    panels = json.loads(grafana.text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    covered = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(covered)) == len(covered), "panels overlap"
    assert max(x for x, _ in covered) == 23
