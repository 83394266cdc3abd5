"""What the dashboard shows: rows of panels, each with its PromQL.

The same families come in two ways: from the router's `/metrics` under their own names, and from
Ray's metrics endpoint as `ray_NAME`, with `_` for each `:`. The dashboard's variable `via` holds
the beginning of a name, so every query asks by a pattern of names, of which one way has one.
A panel asks only for what is really emitted; a test compares.

Of a Ray cluster with several deployments, the variable `deployment` chooses some; without that
label there is nothing to choose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# A pattern of names begins with `^`, where one of Ray's begins with `ray_`: Grafana takes no
# empty value.
VIA = {"the router's /metrics": "^", "Ray's metrics endpoint": "ray_"}
_RANGE = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """One line of a graph, or one for each set of labels that `legend` names."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One graph. `unit` is Grafana's own name of a unit; `width` of 24."""

    title: str
    help: str
    unit: str
    queries: Sequence[Query]
    kind: Literal["timeseries", "stat"] = "timeseries"
    stacked: bool = False
    width: int = 8


def rows() -> Mapping[str, Sequence[Panel]]:
    """All panels, by the title of their row."""
    return {
        "Requests": _requests(),
        "Handoff": _handoff(),
        "Engines": _engines(),
        "Failures": _failures(),
    }


def _requests() -> list[Panel]:
    return [
        Panel(
            "Time to first byte (TTFT)",
            "From a request's arrival at the router to its answer's first byte.",
            "s",
            _quantiles("disagg_router_ttft_seconds"),
        ),
        Panel(
            "Time between tokens (ITL)",
            "tokens: between two tokens of an answer, on the engines. chunks: the mean between "
            "the chunks of one answer, at the router.",
            "s",
            [
                *_quantiles("vllm:inter_token_latency_seconds", what="tokens "),
                *_quantiles("disagg_router_between_chunks_seconds", (0.99,), what="chunks "),
            ],
        ),
        Panel(
            "Requests",
            "By the status that the client got; 499: the client left.",
            "reqps",
            [_rates("disagg_router_requests_total", "status")],
            stacked=True,
        ),
        Panel(
            "In flight",
            "Requests that have a seat at an engine of this role.",
            "short",
            [_now("disagg_router_in_flight", "role")],
        ),
        Panel(
            "Queued at the router",
            "Requests that wait for a seat at an engine.",
            "short",
            [_now("disagg_router_queued", legend="queued")],
        ),
        Panel(
            "Tokens",
            "Prompt tokens taken in and tokens generated, by engine. A prompt that was handed "
            "over counts on both engines.",
            "short",
            [
                _rates("vllm:prompt_tokens_total", "engine", legend="{{engine}} prompt/s"),
                _rates("vllm:generation_tokens_total", "engine", legend="{{engine}} generated/s"),
            ],
        ),
    ]


def _handoff() -> list[Panel]:
    moved, seconds = "disagg_handoff_bytes_total", "disagg_handoff_seconds"
    return [
        Panel(
            "Handoff on the decode engine",
            "From taking a lease into use to its release: connecting, moving, checking.",
            "s",
            _quantiles(seconds),
        ),
        Panel(
            "Legs at the router",
            "The prefill leg; and from its answer to the first bytes of decode's.",
            "s",
            [
                *_quantiles("disagg_router_prefill_seconds", (0.5, 0.99), what="prefill "),
                *_quantiles("disagg_router_handoff_seconds", (0.5, 0.99), what="then decode "),
            ],
        ),
        Panel(
            "KV moved",
            "Bytes that arrived each second, by transport.",
            "Bps",
            [_rates(moved, "transport")],
            stacked=True,
        ),
        Panel(
            "Speed of a handoff",
            "Bytes that arrived for each second that handoffs took, by decode engine.",
            "Bps",
            [
                Query(
                    f"{_rate(moved, 'engine')} / {_rate(f'{seconds}_sum', 'engine')}",
                    "{{engine}}",
                )
            ],
        ),
        Panel(
            "Handoffs",
            "By how they ended on the decode engine.",
            "ops",
            [_rates("disagg_handoffs_total", "transport", "outcome")],
            stacked=True,
        ),
        Panel(
            "Pairings",
            "Requests that were handed off, by who computed the prompt and who answered.",
            "reqps",
            [
                _rates(
                    "disagg_router_pairings_total",
                    "prefill",
                    "decode",
                    legend="{{prefill}} → {{decode}}",
                )
            ],
            stacked=True,
        ),
    ]


def _engines() -> list[Panel]:
    return [
        Panel(
            "Engines",
            "0: it is away, or has a problem; the page /ui says which.",
            "short",
            [_now("disagg_router_engine_up", "engine", function="min")],
            kind="stat",
            width=24,
        ),
        Panel(
            "KV cache in use",
            "Share of an engine's blocks that requests hold.",
            "percentunit",
            [_now("vllm:kv_cache_usage_perc", "engine", function="max")],
        ),
        Panel(
            "Queues of the engines",
            "Requests that run on an engine, and that wait there for a place in a step.",
            "short",
            [
                _now("vllm:num_requests_waiting", "engine", legend="{{engine}} waiting"),
                _now("vllm:num_requests_running", "engine", legend="{{engine}} running"),
            ],
        ),
        Panel(
            "Leases held",
            "Prompts whose blocks a prefill engine keeps until decode has fetched them.",
            "short",
            [_now("disagg_leases_held", "engine")],
        ),
    ]


def _failures() -> list[Panel]:
    return [
        Panel(
            "KV that did not arrive",
            "Decode then computed the prompt itself; docs/connector.md explains the reasons.",
            "ops",
            [_rates("disagg_kv_load_failures_total", "reason")],
            stacked=True,
        ),
        Panel(
            "Prompts left to decode",
            "Requests that were not handed off, and why; docs/router.md explains the reasons.",
            "reqps",
            [_rates("disagg_router_local_total", "reason")],
            stacked=True,
        ),
        Panel(
            "Errors, retries, moves",
            "Answers of 500 and more, legs that went to another engine, streams whose engine died.",
            "ops",
            [
                _rates(
                    "disagg_router_requests_total",
                    "status",
                    where='status=~"5.."',
                    legend="status {{status}}",
                ),
                _rates("disagg_router_retries_total", "role", legend="{{role}} retried"),
                _rates("disagg_router_migrations_total", "outcome", legend="moved: {{outcome}}"),
            ],
        ),
        Panel(
            "Leases",
            "By how they ended on the prefill engine.",
            "ops",
            [_rates("disagg_leases_total", "outcome")],
            stacked=True,
        ),
        Panel(
            "Waits for a seat",
            "How long requests waited at the router that had to wait.",
            "s",
            _quantiles("disagg_router_queue_seconds", (0.5, 0.99)),
        ),
        Panel(
            "Engines at rest",
            "1 while an engine that keeps failing gets trial requests alone.",
            "short",
            [_now("disagg_router_engine_resting", "engine", function="max")],
        ),
    ]


def _select(metric: str, where: str = "") -> str:
    pattern = metric.replace(":", "[:_]")
    asked = [f'__name__=~"${{via}}{pattern}"', 'deployment=~"$deployment"', *filter(None, [where])]
    return f"{{{', '.join(asked)}}}"


def _by(function: str, labels: Sequence[str], expr: str) -> str:
    return f"{function} by ({', '.join(labels)}) ({expr})" if labels else f"{function}({expr})"


def _rate(metric: str, *labels: str, where: str = "") -> str:
    return _by("sum", labels, f"rate({_select(metric, where)}[{_RANGE}])")


def _rates(metric: str, *labels: str, where: str = "", legend: str = "") -> Query:
    named = legend or " ".join(f"{{{{{label}}}}}" for label in labels)
    return Query(_rate(metric, *labels, where=where), named)


def _now(metric: str, *labels: str, function: str = "sum", legend: str = "") -> Query:
    named = legend or " ".join(f"{{{{{label}}}}}" for label in labels)
    return Query(_by(function, labels, _select(metric)), named)


def _quantiles(
    metric: str, quantiles: Sequence[float] = (0.5, 0.9, 0.99), *, what: str = ""
) -> list[Query]:
    buckets = _rate(f"{metric}_bucket", "le")
    return [
        Query(f"histogram_quantile({quantile:g}, {buckets})", f"{what}p{100 * quantile:g}")
        for quantile in quantiles
    ]
