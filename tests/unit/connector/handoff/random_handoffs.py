"""Plays random episodes one after the other, here or in several processes, and adds them up.

    python -m unit.connector.handoff.random_handoffs --handoffs 20000 --seed 7

Each line of its output is one JSON object: a seed that began, an episode's outcomes, or a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from unit.connector.handoff.episode_plan import EpisodePlan
from unit.connector.handoff.episodes import SECRET, Episode, Tally
from unit.connector.handoff.points import install
from unit.connector.modelless import one_rank

from disagg.testing.checkpoint import make_model
from disagg.transport.control.secret import SECRET_VARIABLE

# An episode takes seconds. All its waits have deadlines of their own, which say more.
_EPISODE_S = 600
_SHOW_S = 10.0

Play = Callable[[int], Tally]


def episodes_in(model: Path, storage: Path, patch: pytest.MonkeyPatch) -> Play:
    """What plays the episode of a seed. It needs vLLM's parallel groups (`one_rank`)."""
    patch.setenv(SECRET_VARIABLE, SECRET.decode())
    storage.mkdir(mode=0o700)
    points = install(patch)

    def play(seed: int) -> Tally:
        plan = EpisodePlan.of(seed, storage)
        try:
            return Episode(plan, model, storage, points).run()
        except BaseException as error:
            error.add_note(f"{plan}\nto play it again: DISAGG_TEST_SEED={seed}")
            for file in storage.iterdir():
                file.unlink()
            raise

    return play


@contextlib.contextmanager
def all_set() -> Iterator[Play]:
    """The same in a process that has nothing yet."""
    logging.disable(logging.CRITICAL)
    with (
        tempfile.TemporaryDirectory(prefix="disagg-handoffs-") as name,
        pytest.MonkeyPatch.context() as patch,
    ):
        folder = Path(name)
        make_model(folder / "model", layers=2, hidden=16, kv_heads=2, head_dim=8)
        with one_rank(folder):
            gc.collect()
            gc.freeze()  # vLLM's own objects stay; episodes collect theirs
            yield episodes_in(folder / "model", folder / "storage", patch)


def main() -> None:
    """Play episodes of `seed`, `seed` + `stride` and so on, until so many handoffs have ended."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--handoffs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--stride", type=int, default=1)
    options = parser.parse_args()
    seed, left = options.seed, options.handoffs
    with all_set() as play:
        while left > 0:
            _say(seed=seed)
            faulthandler.dump_traceback_later(_EPISODE_S, exit=True)
            try:
                tally = play(seed)
            except BaseException:
                _say(failed=traceback.format_exc())
                raise
            _say(outcomes=tally.outcomes, handoffs=tally.handoffs, events=tally.events)
            left -= tally.handoffs
            seed += options.stride
        faulthandler.cancel_dump_traceback_later()


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Progress:
    """Sums over several processes."""

    def __init__(self, goal: int, show: Callable[[str], None]) -> None:
        self.goal, self._show = goal, show
        self.outcomes, self.events = Counter[str](), Counter[str]()
        self.handoffs = self.episodes = 0
        self._began = self._shown = time.monotonic()

    def add(self, said: dict[str, Any]) -> None:
        """One line of a process."""
        if "outcomes" in said:
            self.outcomes.update(said["outcomes"])
            self.events.update(said["events"])
            self.handoffs += said["handoffs"]
            self.episodes += 1

    def show(self, *, now: bool = False) -> None:
        """Rate, outcomes and the time left, every few seconds."""
        if not now and time.monotonic() - self._shown < _SHOW_S:
            return
        self._shown = time.monotonic()
        seconds = self._shown - self._began
        rate = self.handoffs / seconds
        left = (self.goal - self.handoffs) / rate / 60 if rate else float("nan")
        counts = ", ".join(f"{count:,} {what}" for what, count in self.outcomes.most_common())
        self._show(
            f"{self.handoffs:,} of {self.goal:,} handoffs in {self.episodes:,} episodes and "
            f"{seconds:,.0f} s ({rate:.0f}/s, {max(0.0, left):.0f} minutes left): {counts}"
        )


def in_processes(goal: int, seed: int, processes: int, show: Callable[[str], None]) -> Progress:
    """So many handoffs in so many processes. Raises `AssertionError` with the first failure."""
    progress, lines = Progress(goal, show), SimpleQueue[tuple[int, str]]()
    started = [_start(number, goal, seed, processes, lines) for number in range(processes)]
    seeds, running = dict[int, int](), processes
    try:
        while running:
            progress.show()
            try:
                number, line = lines.get(timeout=1.0)
            except Empty:
                continue
            if not line:
                running -= 1
                code = started[number].wait(60)
                assert code == 0, f"the process of seed {seeds.get(number)} ended with {code}"
                continue
            said = json.loads(line)
            assert "failed" not in said, f"seed {seeds[number]}: {said['failed']}"
            seeds[number] = said.get("seed", seeds.get(number))
            progress.add(said)
    finally:
        for process in started:
            process.kill()
            process.wait(60)
        progress.show(now=True)
    return progress


def _start(
    number: int, goal: int, seed: int, stride: int, lines: SimpleQueue[tuple[int, str]]
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __name__]
    options = {"--handoffs": -(-goal // stride), "--seed": seed + number, "--stride": stride}
    command += [str(part) for option in options.items() for part in option]
    # One thread for tensors: they are tiny, and threads that wait for work take time.
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout

    def read() -> None:
        for line in output:
            if line.startswith("{"):
                lines.put((number, line))
        lines.put((number, ""))

    threading.Thread(target=read, name=f"output of process {number}", daemon=True).start()
    return process


if __name__ == "__main__":
    main()
