"""The autoscaler on loads that rise, fall, oscillate and burst, with a simulated clock."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median_low

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from disagg.cluster.supervisor.autoscaling import LOOK_S, Autoscaler, PoolLoad
from disagg.config import AutoscaleSection, Deployment
from disagg.config_file import explain

BEGAN = 100_000.0
"""The clock's time at the first look, as a machine's that has run for a day."""


def section(**values: float) -> AutoscaleSection:
    numbers = {"min_replicas": 1, "max_replicas": 4, "target_queue": 8, "cooldown_s": 60}
    return AutoscaleSection.model_validate({**numbers, **values})


def changes(
    settings: AutoscaleSection, load: Sequence[tuple[float, float, float]], replicas: int = 1
) -> list[tuple[float, int]]:
    """(seconds, replicas) of all decisions. load: phases of (seconds, requests, KV caches)."""
    scaler, now, found = Autoscaler(settings), BEGAN, []
    for seconds, requests, caches in load:
        until = now + seconds
        while now < until:
            decision = scaler.look(now, PoolLoad(replicas, requests, caches), replicas)
            if decision is not None:
                replicas = decision.replicas
                found.append((now - BEGAN, replicas))
            now += LOOK_S
    return found


def test_grows_to_what_is_needed_and_back() -> None:
    grown, shrunk = changes(section(), [(20, 0, 0), (100, 30, 0), (100, 3, 0)])
    assert grown[1] == 4
    assert 20 + 4 <= grown[0] <= 20 + 8
    assert shrunk[1] == 1
    assert 120 + 60 <= shrunk[0] <= 120 + 66


def test_cache_counts_as_requests_do() -> None:
    assert changes(section(), [(30, 1, 1.7)]) == [(10.0, 3)]
    assert changes(section(), [(30, 1, 0.8)]) == []


def test_burst_is_not_followed() -> None:
    assert changes(section(), [(20, 0, 0), (4, 100, 0), (100, 0, 0)]) == []


def test_bounds() -> None:
    assert changes(section(min_replicas=2), [(200, 0, 0)], 3) == [(60.0, 2)]
    assert changes(section(max_replicas=3), [(200, 1000, 30)]) == [(10.0, 3)]


def test_wobble_about_the_edge_changes_nothing_twice() -> None:
    wobble = [(LOOK_S, 8.0 + (i % 2), 0.0) for i in range(300)]
    for replicas in (1, 2):
        assert len(changes(section(), wobble, replicas)) < 2


def test_empty_moments_do_not_hide_a_load() -> None:
    """With short requests every other look finds few requests, or none."""
    short = [(LOOK_S, requests, 0.0) for requests in (0, 30, 22, 3, 25, 20) * 8]
    assert [count for _, count in changes(section(), short)] == [3]


def test_square_wave_gives_one_change_an_edge() -> None:
    wave = [(120.0, requests, 0.0) for requests in (2, 30) * 5]
    found = changes(section(cooldown_s=30), wave)
    assert [count for _, count in found] == [4, 1] * 4 + [4]


def test_decision_says_its_inputs() -> None:
    scaler = Autoscaler(section())
    for now in (0.0, 2.0, 4.0, 6.0, 8.0, 10.0):
        decision = scaler.look(now, PoolLoad(2, 20, 0.5), 2)
    assert decision is not None
    for word in ("20 requests", "target_queue 8", "0.50 KV caches", "2 engines"):
        assert word in decision.why


def needed_at(looks: list[tuple[float, float]], last: int) -> int:
    """From the looks of the last ten seconds."""
    seen = looks[max(0, last - 5) : last + 1]
    requests, caches = (median_low(values) for values in zip(*seen, strict=True))
    return min(max(math.ceil(requests / 8), math.ceil(round(caches / 0.8, 6)), 1), 4)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 6)), min_size=1, max_size=120),
    st.integers(1, 4),
    st.sampled_from([0.0, 10.0, 60.0]),
)
def test_any_load(looks: list[tuple[float, float]], replicas: int, cooldown_s: float) -> None:
    """Decisions stay within the bounds and follow need; no pool shrinks within a cooldown."""
    settings = section(cooldown_s=cooldown_s)
    load = [(LOOK_S, requests, caches) for requests, caches in looks]
    found = changes(settings, load, replicas)
    counts = [replicas, *(count for _, count in found)]
    assert all(1 <= count <= 4 for count in counts)
    for (when, after), before in zip(found, counts, strict=False):
        last = int(when / LOOK_S)
        usual = [needed_at(looks, i) for i in range(last + 1)]
        first = max(0, math.ceil((when - cooldown_s) / LOOK_S))
        assert after != before
        assert after == (usual[-1] if after > before else max(usual[first:]))
    for (one, more), (other, fewer) in itertools.pairwise(found):
        assert fewer > more or other - one >= cooldown_s


@pytest.mark.parametrize(
    ("pool", "problem"),
    [
        ({"autoscale": {"min_replicas": 3, "max_replicas": 2}}, "min_replicas (3) is above"),
        ({"replicas": 5, "autoscale": {"max_replicas": 2}}, "replicas (5) is not within"),
        ({"autoscale": {}}, "decode.autoscale.max_replicas: missing"),
        ({"autoscale": {"max_replica": 2}}, "did you mean max_replicas?"),
    ],
)
def test_section_that_cannot_be(pool: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Deployment.model_validate({"model": {"path": "m"}, "decode": pool})
    assert problem in "\n".join(explain(refused.value, Deployment))
