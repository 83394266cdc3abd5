"""Makes Grafana's JSON from the panels: `python -m disagg.dashboards.grafana` writes `disagg.json`.

That file is shipped. A test fails if it does not match the panels. Grafana 10.3 and later read
schema version 39.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from disagg.dashboards.panels import VIA, Panel, rows

FILE = Path(__file__).with_name("disagg.json")
UID = "disagg"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _STAT_HEIGHT = 24, 8, 4


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana imports it."""
    return {
        "uid": UID,
        "title": "disagg",
        "description": "Prefill and decode apart: requests, handoffs, engines, failures.",
        "tags": ["disagg", "vllm", "ray"],
        "schemaVersion": 39,
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource_variable(), _via_variable(), _deployment_variable()]},
        "panels": list(_placed()),
    }


def text() -> str:
    """The dashboard as the text of the file."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def _datasource_variable() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }


def _via_variable() -> dict[str, Any]:
    options = [
        {"text": text, "value": value, "selected": not number}
        for number, (text, value) in enumerate(VIA.items())
    ]
    return {
        "name": "via",
        "label": "Metrics from",
        "type": "custom",
        "query": ", ".join(f"{text} : {value}" for text, value in VIA.items()),
        "options": options,
        "current": options[0],
    }


def _deployment_variable() -> dict[str, Any]:
    query = 'label_values({__name__=~"${via}disagg_router_in_flight"}, deployment)'
    return {
        "name": "deployment",
        "label": "Deployment",
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": "deployments"},
        "definition": query,
        "refresh": 2,  # when the time range changes
        "multi": True,
        "includeAll": True,
        "allValue": ".*",  # also matches series without this label
        "current": {"text": ["All"], "value": ["$__all"], "selected": True},
    }


def _placed() -> Iterator[dict[str, Any]]:
    ids, y = itertools.count(1), 0
    for title, panels in rows().items():
        place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
        yield {"id": next(ids), "type": "row", "title": title, "gridPos": place, "panels": []}
        x, y, height = 0, y + 1, 0
        for panel in panels:
            if x + panel.width > _WIDTH:
                x, y = 0, y + height
            height = _STAT_HEIGHT if panel.kind == "stat" else _HEIGHT
            place = {"x": x, "y": y, "w": panel.width, "h": height}
            yield {"id": next(ids), "gridPos": place, **_panel(panel)}
            x += panel.width
        y += height


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": _DATASOURCE,
            "expr": query.expr,
            "legendFormat": query.legend,
        }
        for number, query in enumerate(panel.queries)
    ]
    look = _stat() if panel.kind == "stat" else _timeseries(panel)
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATASOURCE,
        "targets": targets,
        **look,
    }


def _timeseries(panel: Panel) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
    custom = {"lineWidth": 1, "fillOpacity": 30 if panel.stacked else 5, "stacking": stacking}
    return {
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _stat() -> dict[str, Any]:
    """A tile for each engine, green while the engine answers."""
    states = {"0": {"text": "down", "color": "red"}, "1": {"text": "up", "color": "green"}}
    return {
        "fieldConfig": {
            "defaults": {"mappings": [{"type": "value", "options": states}]},
            "overrides": [],
        },
        "options": {
            "colorMode": "background",
            "graphMode": "none",
            "textMode": "value_and_name",
            "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        },
    }


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
