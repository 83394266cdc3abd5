"""Data parallel decode groups that are added, drained and replaced while requests run.

The resources are tiny but not zero, so that Ray places each group by a placement group.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.test_data_parallel import Reference, ask
from cluster.test_serve import (
    Served,
    actor_named,
    command,
    deployment,
    end,
    handed_over,
    launch,
    states,
    temporary,
)
from disagg.testing.ports import free_port
from engine.windows import make_experts

CHANGE_S = 600  # of each change; an engine may take minutes to start beside other tests
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * CHANGE_S)]

TOKENS, PROMPTS, CLIENTS = 64, 8, 3
FIRST, SECOND = ("decode-0", "decode-1"), ("decode-2", "decode-3")


@dataclass
class Scene:
    """A deployment with one decode group, prompts, and the right answers."""

    served: Served
    port: int
    folder: Path
    content: dict[str, Any]
    prompts: list[list[int]]
    right: list[list[int]]

    def serving(self) -> dict[str, str]:
        found = states(self.port)
        assert found.pop("prefill-0") == "up"
        return found

    def change(self, **decode: Any) -> str:
        """What `disagg apply` says of the deployment with these keys of its decode pool."""
        file = self.folder / "changed.yaml"
        file.write_text(yaml.safe_dump(self.content | {"decode": self.content["decode"] | decode}))
        return self._done("apply", str(file))

    def scale(self, replicas: int) -> str:
        return self._done("scale", f"decode={replicas}")

    def _done(self, *words: str) -> str:
        changing = command(self.served, *words)
        said = changing.communicate(timeout=CHANGE_S)[0]
        assert changing.returncode == 0, said + self.served.text
        return said


@dataclass
class Clients:
    """Clients that ask all the time. Each answer must be right."""

    scene: Scene
    count: int
    answered: int = 0
    wrong: list[str] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[Clients]:
        done = threading.Event()
        with ThreadPoolExecutor(self.count) as pool:
            for number in range(self.count):
                pool.submit(self._ask, random.Random(number), done)
            try:
                yield self
            finally:
                done.set()
        assert not self.wrong
        assert self.answered > self.count

    def _ask(self, chance: random.Random, done: threading.Event) -> None:
        while not done.is_set():
            number = chance.randrange(PROMPTS)
            try:
                answer = ask(self.scene.port, self.scene.prompts[number], TOKENS)
            except Exception as error:  # noqa: BLE001 - reported above
                self.wrong.append(repr(error))
                return
            if answer != self.scene.right[number]:
                self.wrong.append(f"prompt {number}: {answer}")
            self.answered += 1


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder, port = tmp_path_factory.mktemp("groups"), free_port()
    make_experts(folder / "model")
    content = deployment(folder / "model", port)
    content["engine"]["args"]["enforce_eager"] = True
    content["decode"] = {
        "args": {"data_parallel_size": 2},
        "resources": {"num_cpus": 0.1},
    }
    content["router"]["pairing"] = {"local_prefill_tokens": 0}
    chance = random.Random(7)
    prompts = [[chance.randrange(300, 1000) for _ in range(400)] for _ in range(PROMPTS)]
    with temporary() as temp:
        served = launch(folder, temp, "groups", content)
        try:
            reference = Reference(folder / "model")
            right = [reference.answer(ids, TOKENS) for ids in prompts]
            served.until(
                lambda: "Ready: " in served.text or served.process.poll() is not None, CHANGE_S
            )
            assert served.process.poll() is None, served.text
            yield Scene(served, port, folder, content, prompts, right)
        finally:
            end(served)
        served.check_nothing_left()


def up(*groups: tuple[str, ...]) -> dict[str, str]:
    return {name: "up" for group in groups for name in group}


def test_scaled_up_and_down(scene: Scene) -> None:
    """The supervisor dies while the second group starts; the next one goes on with it."""
    served = scene.served
    assert scene.serving() == up(FIRST)
    with Clients(scene, CLIENTS).running() as clients:
        scaling = command(served, "scale", "decode=2")
        served.until(lambda: "starting decode-2, decode-3" in served.text, 120)
        actor_named(served, "SupervisorActor").kill()
        said = scaling.communicate(timeout=120)[0]
        assert scaling.returncode, said
        served.until_shown("the supervisor is back")
        scene.scale(2)
        assert scene.serving() == up(FIRST, SECOND)
        assert served.text.count("starting decode-") == 1
        served.until(lambda: all(handed_over(scene.port, name) for name in SECOND), 60)
        served.note()
        before = clients.answered
        said = scene.scale(1)
        assert "decode-2 and decode-3 drain" in said
        assert "decode-2 and decode-3 are idle and end" in said
        assert scene.serving() == up(FIRST)
        assert clients.answered > before


def test_replaced_as_groups(scene: Scene) -> None:
    """By another engine argument, and another number of groups, in one change."""
    served = scene.served
    args = {"data_parallel_size": 2, "max_num_seqs": 16}
    scene.content["decode"]["args"] = args
    with Clients(scene, CLIENTS).running():
        said = scene.change(replicas=2)
    steps = [
        "starting decode-2, decode-3",
        "starting decode-4, decode-5",
        "decode-0 and decode-1 drain",
        "decode-0 and decode-1 are idle and end",
    ]
    found = re.findall("starting decode.*|decode-. and decode-. .*", said)
    assert sorted(found) == sorted(steps)
    assert found.index(steps[0]) < found.index(steps[2]) < found.index(steps[3])
    assert scene.serving() == up(SECOND, ("decode-4", "decode-5"))
    served.note()
    assert "decode-4 and decode-5 drain" in scene.change(replicas=1)
    assert scene.serving() == up(SECOND)


def test_of_another_size(scene: Scene) -> None:
    """A group gives way to one engine, and this one to a group."""
    before = sorted(scene.serving())
    with Clients(scene, CLIENTS).running():
        said = scene.change(args={})
        (alone,) = scene.serving()
        assert alone not in before
        assert f"starting {alone}\n" in said
        assert f"{' and '.join(before)} are idle and end" in said
        scene.served.note()
        said = scene.change()
        after = sorted(scene.serving())
        assert after in (list(FIRST), list(SECOND))
        assert f"starting {', '.join(after)}\n" in said
        assert f"{alone} is idle and ends" in said


def test_the_autoscaler_counts_groups(scene: Scene) -> None:
    served = scene.served
    section = {"min_replicas": 1, "max_replicas": 3, "target_queue": 4, "cooldown_s": 10}
    said = scene.change(autoscale=section)
    assert "starting" not in said
    with Clients(scene, 6).running():
        served.until(lambda: "autoscaler: decode 1 -> " in served.text, 60)
        decided = next(line for line in served.text.splitlines() if "autoscaler:" in line)
        requests = re.search(r"1 -> 2: (\d+) requests \(target_queue 4 .* on 1 engines", decided)
        assert requests, decided
        assert 4 < int(requests[1]) <= 6
        served.until(lambda: len(scene.serving()) == 4, CHANGE_S)
        served.until(lambda: set(scene.serving().values()) == {"up"}, CHANGE_S)
        served.note()
        time.sleep(12)
        assert served.text.count("autoscaler:") == 1, served.text
    served.until(lambda: "autoscaler: decode 2 -> 1" in served.text, 60)
    served.until(lambda: len(scene.serving()) == 2, 60)
    last = served.text.rpartition("autoscaler:")[2]
    assert re.search(r"decode-\d and decode-\d are idle and end", last)
