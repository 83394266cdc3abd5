"""The owner of the router of several deployments: what it sends, and what it does after a death.

A stand-in takes the place of Ray's actor; tests/cluster/test_several.py kills a real one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import pytest

from disagg.cluster.router_handle import RouterHandle, RouterSpec
from disagg.cluster.router_owner import RouterOwner
from disagg.config import Role, RouterSection
from disagg.engine.spec import EngineInfo
from disagg.errors import StartupError
from disagg.router.topology import Away, EngineEndpoint


class Handle(RouterHandle):
    """Notes the engines that a router would get. `fails`: how many of its next starts fail."""

    def __init__(self) -> None:
        super().__init__(RouterSpec("", RouterSection(), "ns", "node", (), "key", False))
        self.starts: list[tuple[list[str], dict[str, Away]]] = []
        self.told: list[tuple[list[str], dict[str, Away]]] = []
        self.dead, self.fails, self.launches = False, 0, 0

    def launch(self) -> None:
        self.launches += 1

    def start(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        if self.fails:
            self.fails -= 1
            raise StartupError("the port is not free yet")
        self.dead = False
        self.starts.append(([engine.name for engine in engines], dict(down)))

    def replace(self, engines: Sequence[EngineEndpoint], down: Mapping[str, Away]) -> None:
        self.told.append(([engine.name for engine in engines], dict(down)))

    def has_ended(self) -> bool:
        return self.dead

    def why_ended(self) -> str:
        return "it was killed"

    def kill(self) -> None:
        self.dead = False


def info(name: str) -> EngineInfo:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    return EngineInfo(name, role, f"http://127.0.0.1/{name}", 1, "node", {}, 1.0)


BOTH = [info("prefill-0"), info("decode-0")]
ALL = ["chat/prefill-0", "chat/decode-0", "code/prefill-0", "code/decode-0"]


@pytest.fixture
def handle() -> Handle:
    return Handle()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def owner(handle: Handle, said: list[str]) -> RouterOwner:
    owner = RouterOwner(handle, lambda what, _: said.append(what))
    owner.start({"chat": BOTH, "code": BOTH})
    return owner


def test_one_deployment_has_no_prefix(handle: Handle) -> None:
    owner = RouterOwner(handle, lambda what, tail: None)
    owner.start({"": BOTH})
    owner.replace("", BOTH[:1], {"decode-0": Away("starts again")})
    assert handle.starts == [(["prefill-0", "decode-0"], {})]
    assert handle.told == [(["prefill-0"], {"decode-0": Away("starts again")})]


def test_a_change_of_one_leaves_the_others(owner: RouterOwner, handle: Handle) -> None:
    assert handle.starts == [(ALL, {})]
    owner.replace("chat", BOTH[:1], {"decode-0": Away("starts again")})
    owner.replace("code", [*BOTH, info("decode-1")], {})
    engines, down = handle.told[-1]
    assert engines == ["chat/prefill-0", *ALL[2:], "code/decode-1"]
    assert down == {"chat/decode-0": Away("starts again")}


def test_a_router_that_restarts_gets_the_engines_of_all(
    owner: RouterOwner, handle: Handle, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(1000.0, 10.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    owner.replace("chat", BOTH[:1], {"decode-0": Away("starts again", back_s=600.0)})
    assert owner.step() is None
    assert said == []
    handle.dead = True
    assert owner.step() is None
    engines, down = handle.starts[-1]
    assert engines == ["chat/prefill-0", *ALL[2:]]
    # The seconds that passed since its supervisor told them are not added.
    left = down["chat/decode-0"].back_s
    assert left is not None
    assert 0 < left < 600
    assert said[0] == "the router died: it was killed; starting it again"
    assert said[1].startswith("the router is back after ")


def test_a_start_is_tried_once_more(owner: RouterOwner, handle: Handle) -> None:
    handle.dead, handle.fails = True, 1
    assert owner.step() is None
    assert handle.launches == 2
    assert handle.starts[-1] == (ALL, {})
    handle.dead, handle.fails = True, 2
    problem = owner.step()
    assert problem == "the router died and did not start again: the port is not free yet"


def test_a_router_that_always_dies_ends_all(owner: RouterOwner, handle: Handle) -> None:
    for _ in range(5):
        handle.dead = True
        assert owner.step() is None
    handle.dead = True
    assert owner.step() == "the router died 6 times in a row: it was killed"
    assert len(handle.starts) == 6
