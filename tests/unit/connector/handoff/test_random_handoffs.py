"""Random handoffs between whole engines without a model: no wrong byte, no leak, no hang.

DISAGG_TEST_SEED=7         play this seed's episode instead of others, in the short form
DISAGG_TEST_HANDOFFS=1000  how many handoffs the long form has
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit.connector.handoff.broken_rules import RULES
from unit.connector.handoff.episodes import EVENTS
from unit.connector.handoff.random_handoffs import Play, episodes_in, in_processes

pytestmark = pytest.mark.usefixtures("distributed")

ONE_SEED = os.environ.get("DISAGG_TEST_SEED")
MANY = int(os.environ.get("DISAGG_TEST_HANDOFFS", "1000000"))
SHORT = 500
# Their transfers wait half of the time.
_PROCESSES = 2 * (os.cpu_count() or 1)
# So slow is no machine: it ends a run that hangs.
_LEAST_RATE = 10


@pytest.fixture
def play(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Play:
    return episodes_in(model, tmp_path / "storage", monkeypatch)


def seeds() -> Iterator[int]:
    """Some that stay, then fresh ones."""
    if ONE_SEED is not None:
        yield int(ONE_SEED)
        return
    yield from (1, 2)
    while True:
        yield random.SystemRandom().getrandbits(31)


def test_random_handoffs(play: Play) -> None:
    outcomes = Counter[str]()
    for seed in seeds():
        print(f"seed {seed}")
        outcomes += play(seed).outcomes
        if outcomes.total() >= SHORT:
            break
    print(dict(outcomes))
    if ONE_SEED is None:
        assert outcomes["loaded"] > SHORT / 10


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(600 + MANY / _LEAST_RATE)
def test_a_million_random_handoffs(capsys: pytest.CaptureFixture[str]) -> None:
    def show(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    seed = random.SystemRandom().getrandbits(31)
    show(f"\nseeds {seed} and up")
    progress = in_processes(MANY, seed, _PROCESSES, show)
    assert progress.handoffs >= MANY
    for outcome in ("loaded", "not loaded", "cancelled", "computed: lease_gone"):
        assert progress.outcomes[outcome] > MANY / 1000, f"handoffs rarely end so: {outcome}"
    assert all(progress.events[event.__name__] for event in EVENTS)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rule", RULES)
def test_a_broken_rule_is_noticed(rule: str, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    RULES[rule].broken_by(monkeypatch)
    with pytest.raises(AssertionError, match=RULES[rule].noticed) as noticed:  # noqa: PT012
        handoffs = 0
        for seed in RULES[rule].seeds:
            handoffs += play(seed).handoffs
    print(f"after {handoffs} handoffs: {noticed.value}")
