"""A request is understood once: what its plan says, and that nothing else looks into the body."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import disagg.router
from disagg.router.api.paths import CHAT, COMPLETION, MESSAGES, RESPONSES
from disagg.router.request.plan import RequestPlan

ROUTER = Path(disagg.router.__file__).parent
STREAM = {"model": "m", "prompt": "one two", "stream": True, "max_tokens": 8}
TALK = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}


class Counted(dict[str, Any]):
    """A body that counts how often its prompt is read."""

    reads = 0

    def get(self, key: str, default: Any = None) -> Any:
        self.reads += key == "prompt"
        return super().get(key, default)


@pytest.mark.parametrize(
    ("path", "more", "field"),
    [
        (RESPONSES, {}, "path"),
        (COMPLETION, {"stream": False}, "stream"),
        (COMPLETION, {"stop": ["x"]}, "stop"),
        (COMPLETION, {"never_heard_of": 1}, "never_heard_of"),
        (COMPLETION, {"max_tokens": "8"}, "max_tokens"),
        (COMPLETION, {"min_tokens": None}, "min_tokens"),
        (COMPLETION, {"logprobs": False}, "logprobs"),
        (COMPLETION, {"stream_options": []}, "stream_options"),
        (COMPLETION, {"prompt": ["a", "b"]}, "prompt"),
        (CHAT, {"messages": [{"content": [{"type": "image_url"}]}]}, "messages"),
        (COMPLETION, {}, None),
    ],
)
def test_what_stands_against_resuming_is_named(
    path: str, more: dict[str, Any], field: str | None
) -> None:
    plan = RequestPlan(path, {**(TALK if path == CHAT else STREAM), **more})
    assert plan.not_resumed == field
    if field is not None:
        assert plan.not_begun_at_prefill == field, "what cannot be resumed cannot begin at prefill"


@pytest.mark.parametrize(
    ("path", "more", "why"),
    [
        (COMPLETION, {"stream": False, "seed": 1}, "stream"),
        (COMPLETION, {}, "seed"),
        (COMPLETION, {"seed": 7}, None),
        (MESSAGES, {"seed": 7}, "temperature"),
        (RESPONSES, {"seed": 7, "background": True}, "stateful"),
    ],
)
def test_what_stands_against_a_replay_is_named(
    path: str, more: dict[str, Any], why: str | None
) -> None:
    assert RequestPlan(path, {**STREAM, **more}).not_replayed == why


@pytest.mark.parametrize(
    ("path", "more", "why"),
    [
        (COMPLETION, {}, None),
        (COMPLETION, {"prompt": ["a", "b"]}, "several_prompts"),
        (COMPLETION, {"prompt": [1, 2]}, None),
        (COMPLETION, {"prompt_logprobs": 0}, "prompt_logprobs"),
        (COMPLETION, {"echo": True, "logprobs": 0}, "prompt_logprobs"),
        (COMPLETION, {"use_beam_search": True}, "beam_search"),
        (COMPLETION, {"prompt_embeds": ""}, "prompt_embeds"),
        (RESPONSES, {"previous_response_id": "r"}, "stateful"),
        (COMPLETION, {"previous_response_id": "r"}, None),
    ],
)
def test_why_a_request_is_not_split(path: str, more: dict[str, Any], why: str | None) -> None:
    assert RequestPlan(path, {**STREAM, **more}).not_split == why


def test_the_prompt_is_measured_once() -> None:
    body = Counted(STREAM)
    plan = RequestPlan(COMPLETION, body)
    assert body.reads == 0, "of a request that no policy asks about, nothing is measured"
    assert plan.tokens == plan.tokens == 2
    assert plan.prefixes.keys == plan.prefixes.keys
    assert body.reads == 1


def test_a_plan_does_not_change() -> None:
    plan = RequestPlan(COMPLETION, STREAM)
    with pytest.raises(AttributeError):
        plan.path = CHAT  # type: ignore[misc]


def bodies_used(path: Path) -> list[str]:
    """Lines that use a plan's body otherwise than as an argument of a function of `bodies`."""
    tree = ast.parse(path.read_text())
    allowed = {
        id(argument)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "bodies"
        for argument in call.args
    }
    return [
        f"{path.name}:{node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr == "body"
        and isinstance(node.value, ast.Name | ast.Attribute)
        and ast.unparse(node.value).rpartition(".")[2] in ("plan", "_plan", "request")
        and id(node) not in allowed
    ]


def test_nothing_else_looks_into_the_body() -> None:
    """`bodies` copies it to write the legs' bodies. All other modules read the plan."""
    modules = [*ROUTER.glob("request/*.py"), *ROUTER.glob("pairing/*.py")]
    assert len(modules) > 15
    assert [place for path in modules for place in bodies_used(path)] == []


def test_the_rule_sees_a_body_that_is_read(tmp_path: Path) -> None:
    read = tmp_path / "read.py"
    read.write_text("tokens = plan.body.get('prompt')\nleg = bodies.decode_body(plan.body, None)\n")
    assert bodies_used(read) == ["read.py:1"]
