"""`bench handoff` and `bench offload`: from samples to rows, tables and targets."""

from __future__ import annotations

from disagg.bench.first_token import handoff, offload
from disagg.bench.first_token.memcpy import allowed_ms

GB = 1e9


def test_the_allowed_excess_grows_with_the_bytes() -> None:
    assert allowed_ms(0, GB) == 15.0
    assert allowed_ms(100_000_000, 10 * GB) == 30.0


def test_handoffs() -> None:
    seconds = {
        "ours": 0.08,
        "ours floor": 0.05,
        "ours prefill": 0.21,
        "prefill alone": 0.2,
        "local": 0.8,
        "example": 0.1,
        "example floor": 0.05,
    }
    samples = {(1000, way): [taken] for way, taken in seconds.items()}
    rows = handoff._report(samples, [1000], ["example"], 10 * GB, 32 << 10)
    meetings = {"ours first": 70.0, "ours later": 30.0}
    meetings |= {"example first": 300.0, "example later": 30.0}
    first, again = handoff._tables(rows, meetings, ["ours", "example"])
    (row,) = first.rows
    assert (row["excess"], row["allowed excess"]) == (30.0, 19.9)
    assert row["ratio to ExampleConnector"] == 0.8
    assert [r["connector"] for r in again.rows] == ["disagg", "ExampleConnector"]
    found = [one for one in handoff._targets(rows, meetings, ["example"]) if one is not None]
    assert [(one.measured, one.met) for one in found] == [
        (0.8, True),  # of ExampleConnector's time
        (30.0, False),  # excess
        (1.05, False),  # the prefill leg
        (40.0, True),  # the first handoff
    ]


def test_tiers() -> None:
    seconds = {"computed": 0.8, "own cache": 0.05, "host": 0.06, "files": 0.09}
    samples = {(1000, f"ours {source}"): [taken] for source, taken in seconds.items()}
    rows = [offload._row(samples, 1000, 10 * GB)]
    (table,) = offload._tables(rows, [])
    assert (table.rows[0]["host"], table.rows[0]["host's excess"]) == (60.0, 10.0)
    host, decode = [one for one in offload._targets(rows, 1.04) if one is not None]
    assert (host.at, host.at_most, host.met) == ("1,000 tokens", 19.9, True)
    assert (decode.measured, decode.met) == (1.04, False)
