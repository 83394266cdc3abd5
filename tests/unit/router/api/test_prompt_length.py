"""What a prompt is, without a tokenizer: its parts, its length and keys of its prefixes."""

from __future__ import annotations

import copy
from typing import Any

import agent_bodies
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.config import MediaSection
from disagg.router.api import media_size, prompt_parts
from disagg.router.api.paths import CHAT, COMPLETION, MESSAGES, PAIRED, RESPONSES
from disagg.router.api.prompt_length import Length, Scales
from disagg.router.api.prompt_parts import Kind, Media
from disagg.router.pairing.prefix_memory import PrefixMemory
from disagg.router.request.plan import Estimates, RequestPlan

AGENTS = [
    (CHAT, agent_bodies.chat_agent()),
    (MESSAGES, agent_bodies.messages_agent()),
    (RESPONSES, agent_bodies.responses_agent()),
]
PNG, LARGER = agent_bodies.png(560, 560), agent_bodies.png(1120, 560)


def plan(body: dict[str, Any], path: str = CHAT) -> RequestPlan:
    return RequestPlan(path, {"model": "m", **body})


def asked(*content: Any) -> dict[str, Any]:
    """A chat of one message with these parts."""
    return {"messages": [{"role": "user", "content": list(content)}]}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def known(first: dict[str, Any], second: dict[str, Any], path: str = CHAT) -> float:
    """The share of the second prompt that an engine has from the first one."""
    memory, later = PrefixMemory(), plan(second, path)
    memory.note(plan(first, path).prefixes.keys, "e")
    return later.prefixes.known(memory.known(later.prefixes.keys, "e"))


# ---- lengths -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), AGENTS)
def test_all_that_an_agent_sends_counts(path: str, body: dict[str, Any]) -> None:
    """Tools, calls, their results and thoughts: each is missed when it is left out."""
    whole = plan(body, path).tokens
    assert whole > 18_000
    for part in ("tools", "system" if path == MESSAGES else "instructions"):
        if part in body:
            left = {name: value for name, value in body.items() if name != part}
            assert plan(left, path).tokens < whole - 200
    field = "input" if path == RESPONSES else "messages"
    for number in (1, 2):
        left = copy.deepcopy(body)
        del left[field][number]
        assert plan(left, path).tokens < whole - 10


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "assistant", "reasoning_content": "x y " * 400}]}),
        (CHAT, {"messages": [{"role": "tool", "content": [text("x y " * 400)]}]}),
        (CHAT, {"messages": [{"role": "user", "content": {"a field that is new": "x y " * 400}}]}),
        (CHAT, {"messages": [], "documents": [{"title": "t", "text": "x y " * 400}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [
            {"type": "tool_result", "content": "x y " * 400}]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [
            {"type": "document", "source": {"type": "text", "data": "x y " * 400}}]}]}),
        (MESSAGES, {"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "name": "n", "input": {"deep": [{"in": "x y " * 400}]}}]}]}),
        (RESPONSES, {"input": [{"type": "function_call_output", "output": "x y " * 400}]}),
        (RESPONSES, {"input": [{"type": "reasoning", "summary": [
            {"type": "summary_text", "text": "x y " * 400}]}]}),
        (RESPONSES, {"input": [{"type": "custom_tool_call", "input": "x y " * 400}]}),
        (RESPONSES, {"input": "x y " * 400}),
        (COMPLETION, {"prompt": "x y " * 400}),
        (COMPLETION, {"prompt": ["x y " * 400]}),
    ],
)  # fmt: skip
def test_every_text_counts(path: str, body: dict[str, Any]) -> None:
    assert 250 < plan(body, path).tokens < 400


def test_fields_of_messages_that_are_called_as_media_are_none() -> None:
    """SDKs send all fields of an answer back."""
    empty = {"audio": None, "refusal": None, "function_call": None, "tool_calls": None}
    said = {"role": "assistant", "content": "x y " * 400}
    bare = plan({"messages": [said]}).tokens
    assert plan({"messages": [{**said, **empty}]}).tokens == bare
    assert plan({"messages": [{**said, "audio": {"id": "audio_1"}}]}).tokens == bare


def test_an_image_that_a_tool_made_is_no_text() -> None:
    item = {"type": "image_generation_call", "id": "ig_1", "result": PNG.partition(",")[2]}
    assert 400 <= plan({"input": [item]}, RESPONSES).tokens < 425


@pytest.mark.parametrize(
    "outside",
    [
        {"signature": "x y " * 400},
        {"encrypted_content": "x y " * 400},
        {"tool_call_id": "x" * 400},
        {"cache_control": {"type": "ephemeral" * 50}},
    ],
)
def test_what_no_template_writes_does_not_count(outside: dict[str, Any]) -> None:
    assert plan({"messages": [{"role": "user", "content": "hi", **outside}]}).tokens < 20
    assert plan(asked({"type": "thinking", "thinking": "hi", **outside})).tokens < 20


def test_token_ids_are_counted() -> None:
    assert plan({"prompt": list(range(1000))}).tokens == 1000
    assert plan({"prompt": [list(range(9)), list(range(8))]}).tokens == 17
    assert plan({"prompt": list(range(1000)), "truncate_prompt_tokens": 10}).tokens == 10


@given(
    st.dictionaries(
        st.sampled_from(["prompt", "messages", "input", "system", "tools", "instructions"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.just(PNG),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(
                        ["type", "content", "role", "text", "image_url", "source", "data", "input"]
                    ),
                    inner | st.sampled_from(["image", "document", "input_audio", "tool_use"]),
                    max_size=4,
                )
            ),
            max_leaves=12,
        ),
    ),
    st.sampled_from(PAIRED),
)
def test_any_body_has_a_length(body: dict[str, Any], path: str) -> None:
    one = plan(body, path)
    assert one.tokens >= 0
    assert one.prefixes.keys == plan(body, path).prefixes.keys


def test_a_body_that_is_nested_without_end() -> None:
    deep: Any = "x"
    for _ in range(900):
        deep = [deep]
    assert plan({"messages": [{"role": "user", "content": deep}]}).tokens > 0
    assert plan({"prompt": [2**70, -1]}).prefixes.keys
    assert plan({"messages": [{"role": "\ud800", "content": "\udfff"}]}).prefixes.keys


# ---- media -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "part"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": PNG, "detail": "high"}}),
        (CHAT, {"image_url": PNG}),
        (RESPONSES, {"type": "input_image", "image_url": PNG}),
        (RESPONSES, {"type": "computer_screenshot", "image_url": PNG}),
        (MESSAGES, {"type": "image", "source": {
            "type": "base64", "media_type": "image/png", "data": PNG.partition(",")[2]}}),
        (MESSAGES, {"type": "tool_result", "content": [
            {"type": "image", "source": {"type": "base64", "data": PNG.partition(",")[2]}}]}),
    ],
)  # fmt: skip
def test_an_image_counts_by_its_size(path: str, part: dict[str, Any]) -> None:
    field = "input" if path == RESPONSES else "messages"
    body = {field: [{"role": "user", "content": [part]}]}
    assert 400 <= plan(body, path).tokens < 425  # 560 * 560 / 784


def test_media_count_as_the_settings_say() -> None:
    media = MediaSection(pixels_per_token=None, image_tokens=256, audio_tokens_per_s=10)

    def tokens(part: Any) -> int:
        return RequestPlan(CHAT, asked(part), estimates=Estimates(media)).tokens - 6

    assert tokens({"type": "image_url", "image_url": {"url": PNG}}) == 256
    sound = {"data": agent_bodies.wav(30), "format": "wav"}
    assert tokens({"type": "input_audio", "input_audio": sound}) == 300
    assert tokens({"type": "audio_url", "audio_url": {"url": "https://x.y/z.mp3"}}) == 750
    assert tokens({"type": "video_url", "video_url": {"url": "https://x.y/z.mp4"}}) == 4096
    assert tokens({"type": "file", "file": {"file_data": "JVBERi0="}}) == 2048


@given(st.binary(max_size=200), st.sampled_from(Kind))
def test_any_bytes_have_a_size(data: bytes, kind: Kind) -> None:
    for source in (data.decode("latin-1"), f"data:x/y;base64,{data.hex()}"):
        assert media_size.tokens(Media(kind, source), MediaSection()) >= 0


def test_no_xml_is_parsed() -> None:
    """An image may be SVG, whose entities could expand without end."""
    svg = "data:image/svg+xml;base64," + "PHN2ZyB3aWR0aD0iOSIgaGVpZ2h0PSI5Ii8+"
    assert media_size.tokens(Media(Kind.IMAGE, svg), MediaSection()) == 1024


# ---- prefixes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), AGENTS)
def test_an_agents_next_turn_is_known_but_for_what_is_new(path: str, body: dict[str, Any]) -> None:
    field = "input" if path == RESPONSES else "messages"
    before = {**body, field: body[field][:-2]}
    new = 1 - plan(before, path).tokens / plan(body, path).tokens
    assert known(before, body, path) == pytest.approx(1 - new, abs=0.03)
    other = {**body, "tools": [*body["tools"][1:], body["tools"][0]]}
    assert known(other, body, path) < 0.1, "the tools stand before the conversation"


def test_another_image_under_the_same_text_is_not_known() -> None:
    def body(url: str) -> dict[str, Any]:
        return asked({"type": "image_url", "image_url": {"url": url}}, text("What is this? " * 50))

    assert known(body(PNG), body(PNG)) == 1
    other = agent_bodies.png(560, 561)
    assert known(body(PNG), body(other)) == 0
    assert known(body("https://x.y/1.png"), body("https://x.y/2.png")) == 0


@pytest.mark.parametrize(
    "shape",
    [
        {"model": "n"},
        {"cache_salt": "other"},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"mm_processor_kwargs": {"max_pixels": 9}},
    ],
)
def test_what_shapes_the_whole_prompt_is_in_every_key(shape: dict[str, Any]) -> None:
    body = agent_bodies.long_document()
    assert known(body, {**body, **shape}) == 0


def test_short_turns_are_not_taken_for_long_ones() -> None:
    """Chunks go on over the ends of messages: else ten turns of a few words would count as 1,280
    tokens that an engine has, and whatever is said next as nothing new."""
    turns = agent_bodies.conversation(10)["messages"]
    later = {"messages": [*turns, {"role": "user", "content": "word " * 2000}]}
    share = known({"messages": turns}, later)
    assert 0 < share * plan(later).tokens <= plan({"messages": turns}).tokens * 1.1


def test_prefixes_of_token_ids() -> None:
    one, other = list(range(1000)), [*range(500), *range(600)]
    keys, others = (plan({"prompt": prompt}, COMPLETION).prefixes.keys for prompt in (one, other))
    assert keys[:3] == others[:3]
    assert set(keys[3:]).isdisjoint(others[3:])
    assert len(plan({"prompt": "long" * 1_000_000}).prefixes.keys) < 1200


def test_a_long_prompt_that_is_known_is_known_to_its_end() -> None:
    long = {"prompt": list(range(60_000))}
    more = {"prompt": [*range(60_000), *range(200)]}
    assert known(long, more, COMPLETION) > 0.99


# ---- what engines report -----------------------------------------------------------------------


def test_estimates_follow_what_engines_report() -> None:
    """A model whose tokenizer knows the language badly, and another one."""
    scales = Scales()
    estimates = Estimates(scales=scales)

    def tokens(model: str) -> int:
        body = {**agent_bodies.long_document(), "model": model}
        return RequestPlan(CHAT, body, estimates=estimates).tokens

    before = tokens("coarse")
    for _ in range(10):
        body = {**agent_bodies.long_document(), "model": "coarse"}
        RequestPlan(CHAT, body, estimates=estimates).has(2 * before)
    assert tokens("coarse") == pytest.approx(2 * before, rel=0.01)
    assert tokens("another") == before


def test_nonsense_that_an_engine_reports_does_little() -> None:
    scales = Scales()
    scales.learn(Length(text=1000), "m", 10**9)
    assert scales.tokens(Length(text=1000), "m") == 4000
    for reported in (0, -5):
        scales.learn(Length(text=1000), "n", reported)
    scales.learn(Length(text=5), "n", 500)
    scales.learn(Length(text=1000, media=1), "n", 5000)
    assert scales.tokens(Length(exact=7, text=1000), "n") == 1007
    for number in range(200):
        scales.learn(Length(text=1000), f"model {number}", 1000)
    assert scales.tokens(Length(text=1000), "m") == 1000, "what was long ago is forgotten"


def test_parts_come_in_the_order_of_templates() -> None:
    body = agent_bodies.chat_agent(1)
    marks = [part.name for part in prompt_parts.parts(body) if isinstance(part, prompt_parts.Mark)]
    assert marks == ["system", "tools", "user", "assistant", "call", "tool"]
