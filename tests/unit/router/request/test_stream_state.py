"""What passes a watcher is what an unwatched stream would be, and its rest continues it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from disagg.router.api.event_stream import Plain
from disagg.router.api.paths import CHAT, COMPLETION, ENDS, PAIRED
from disagg.router.request.failover import untold
from disagg.router.request.plan import RequestPlan
from disagg.router.request.stream_state import Stream, watched
from disagg.testing.tokenizer import write_tokenizer

PROMPT = [5, 6, 7]
BODY: dict[str, Any] = {"model": "m", "prompt": "x", "stream": True, "max_tokens": 6}
TALK = {"model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True}
SAID = {"max_model_len": "20"}


def sse(content: Any) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def completion(ids: list[int], text: str, prompt: Any = None, finish: Any = None) -> bytes:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
    choice |= {"stop_reason": None, "prompt_token_ids": prompt, "token_ids": ids}
    names = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    return sse({**names, "choices": [choice]})


def chat(delta: Any, ids: Any = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": ids}
    names = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return sse({**names, "choices": [choice], **more})


def watch(path: str, body: Any) -> Stream:
    stream = watched(RequestPlan(path, body))
    assert stream is not None
    return stream


def events(data: bytes) -> list[Any]:
    parts = [part.removeprefix(b"data: ") for part in data.split(b"\n\n") if part]
    return [part if part == b"[DONE]" else json.loads(part) for part in parts]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_what_passes_is_what_was_not_asked_for_ids(size: int) -> None:
    stream = watch(COMPLETION, BODY)
    text = 'data: [DONE]\n\n"token_ids":[1,2],"finish_reason":"x" data: {"error"'
    whole = completion([1], text, PROMPT) + completion([2, 3], "b") + b"data: [DONE]\n\n"
    passed = b"".join(stream.feed(whole[at : at + size]) for at in range(0, len(whole), size))
    plain = whole.replace(b"[5,6,7]", b"null").replace(b'ids":[1]', b'ids":null')
    assert passed == plain.replace(b'ids":[2,3]', b'ids":null')
    assert stream.tokens() == [1, 2, 3]
    assert stream.is_whole
    assert stream.left() == b""


@pytest.mark.parametrize(
    ("path", "limits", "said", "most"),
    [
        (COMPLETION, {}, SAID, 16),
        (COMPLETION, {"max_tokens": None}, SAID, 16),
        (COMPLETION, {"max_tokens": 9}, {}, 9),
        (CHAT, {}, SAID, 17),
        (CHAT, {"max_tokens": None, "max_completion_tokens": None}, SAID, 17),
        (CHAT, {}, {**SAID, "max_tokens": ""}, 17),
        (CHAT, {}, {**SAID, "max_tokens": "12"}, 12),
        (CHAT, {}, {**SAID, "max_tokens": "99"}, 17),
        (CHAT, {"max_tokens": 5}, {}, 5),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 8}, SAID, 8),
        (CHAT, {}, {}, None),
    ],
)
def test_how_many_tokens_the_rest_may_have(
    path: str, limits: dict[str, Any], said: dict[str, str], most: int | None
) -> None:
    """A chat without a limit goes on to the end of the context; a completion of vLLM's without one
    has 16."""
    asked = {"model": "m", "prompt": "x", "stream": True} if path == COMPLETION else TALK
    stream = watch(path, {**asked, **limits})
    if path == COMPLETION:
        stream.feed(completion([1], "a", PROMPT))
    else:
        stream.feed(chat({"role": "assistant", "content": ""}, prompt_token_ids=PROMPT))
        stream.feed(chat({"content": "a"}, [1]))
    rest = stream.rest(0, said)
    assert (rest and rest["max_tokens"] + 1) == most


def test_the_rest_of_a_completion() -> None:
    options = {"stream_options": {"include_usage": True}, "min_tokens": 3, "temperature": 0}
    stream = watch(COMPLETION, {**BODY, **options})
    stream.feed(completion([1], "a", PROMPT) + completion([2], "b") + completion([3], "")[:20])
    assert not stream.is_whole
    rest = stream.rest(0, SAID)
    assert rest is not None
    assert rest["prompt"] == [*PROMPT, 1, 2]
    assert (rest["max_tokens"], rest["min_tokens"]) == (4, 1)
    stream.goes_on(0)
    usage = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    last = {"id": "cmpl-2", "object": "text_completion", "created": 9, "model": "m"}
    data = completion([3], "c", [*PROMPT, 1, 2]).replace(b"cmpl-1", b"cmpl-2")
    data += completion([4, 5, 6], "def", finish="length")
    data += sse({**last, "choices": [], "usage": usage}) + b"data: [DONE]\n\n"
    seen = events(stream.feed(data))
    assert [c["text"] for e in seen[:2] for c in e["choices"]] == ["c", "def"]
    assert {e["id"] for e in seen[:3]} == {"cmpl-1"}
    assert seen[0]["choices"][0]["token_ids"] is seen[0]["choices"][0]["prompt_token_ids"] is None
    assert seen[2]["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert seen[2]["created"] == 1
    assert seen[3] == b"[DONE]"
    assert stream.is_whole


def test_the_rest_of_a_chat() -> None:
    stream = watch(CHAT, TALK)
    stream.feed(chat({"role": "assistant", "content": ""}, prompt_token_ids=PROMPT))
    stream.feed(chat({"content": "a"}, [1]))
    rest = stream.rest(0, SAID)
    assert rest is not None
    assert rest["max_tokens"] == 16
    assert "messages" not in rest
    stream.goes_on(0)
    seen = events(stream.feed(completion([2], "") + completion([3], "ä", finish="stop")))
    assert seen[0]["object"] == "chat.completion.chunk"
    assert [e["choices"][0]["delta"] for e in seen] == [{"content": "ä"}]
    assert seen[0]["choices"][0]["finish_reason"] == "stop"
    assert stream.left() == b"data: [DONE]\n\n"


def test_a_client_that_asks_for_ids_gets_each_once() -> None:
    stream = watch(COMPLETION, {**BODY, "return_token_ids": True})
    whole = completion([1], "a", PROMPT) + completion([2], "b")
    assert stream.feed(whole) == whole
    stream.goes_on(0)
    seen = events(stream.feed(completion([3], "c", [*PROMPT, 1, 2]) + completion([4, 5], "de")))
    assert [e["choices"][0]["token_ids"] for e in seen] == [[3], [4, 5]]
    assert all(e["choices"][0]["prompt_token_ids"] is None for e in seen)


def with_half_a_character() -> Stream:
    """The client has an id more than text."""
    stream = watch(COMPLETION, {**BODY, "return_token_ids": True})
    stream.feed(completion([1], "a", PROMPT) + completion([2], ""))
    rest = stream.rest(1, SAID)
    assert rest is not None
    assert rest["prompt"] == [*PROMPT, 1]
    stream.goes_on(1)
    return stream


@pytest.mark.parametrize(
    ("said", "seen"),
    [
        ([([2], ""), ([3], "ä"), ([4], "b")], [([3], "ä"), ([4], "b")]),
        ([([2, 3], "ä"), ([4], "b")], [([3], "ä"), ([4], "b")]),
        ([([2], "?"), ([4], "b")], [([], "?"), ([4], "b")]),
    ],
)
def test_an_id_that_is_given_again_is_not_told_again(
    said: list[tuple[list[int], str]], seen: list[tuple[list[int], str]]
) -> None:
    """The token was sent without its text, which only came of the next ones."""
    stream = with_half_a_character()
    told = events(stream.feed(b"".join(completion(*each) for each in said)))
    choices = [each["choices"][0] for each in told]
    assert [(one["token_ids"], one["text"]) for one in choices] == seen
    assert stream.failure is None
    assert stream.tokens() == [1, *(id_ for ids, _ in said for id_ in ids)]


def test_an_id_that_is_given_again_breaks_off_too() -> None:
    """Whether it was given again by then or not."""
    stream = with_half_a_character()
    assert stream.has_begun
    stream.goes_on(0)
    assert events(stream.feed(completion([2], ""))) == []
    stream.goes_on(1)
    told = events(stream.feed(completion([2, 3], "ä")))
    assert [each["choices"][0]["token_ids"] for each in told] == [[3]]


def test_what_came_with_an_error_is_passed_on() -> None:
    """Of an engine that went on and then failed, too: the tokens are known, so the text must be."""
    stream = watch(COMPLETION, BODY)
    stream.feed(completion([1], "a", PROMPT))
    stream.goes_on(0)
    error = b'data: {"error": {"message": "m", "type": "t", "code": 500}}\n\n'
    seen = events(stream.feed(completion([2], "b") + completion([3], "c") + error))
    assert [each["choices"][0]["text"] for each in seen] == ["b", "c"]
    assert stream.failure is not None
    assert stream.tokens() == [1, 2, 3]


@pytest.mark.parametrize(
    "said",
    [
        completion([5], "b") + completion([4], "c", finish="stop"),
        completion([], "", finish="stop"),
    ],
    ids=["another", "none"],
)
def test_another_id_where_one_was_told_is_an_error(said: bytes) -> None:
    stream = with_half_a_character()
    seen = stream.feed(said)
    assert seen == b""
    assert stream.failure is not None
    assert "answers otherwise" in str(stream.failure)
    assert not stream.is_whole
    assert not stream.asks_anew
    assert stream.rest(0, SAID) is None


def test_a_chat_with_ids() -> None:
    talk = watch(CHAT, {**TALK, "return_token_ids": True})
    talk.feed(chat({"role": "assistant", "content": ""}, prompt_token_ids=PROMPT))
    assert not talk.has_begun
    talk.feed(chat({"content": ""}, [1]))
    assert talk.has_begun, "its token's id was told"
    talk.goes_on(0)
    seen = events(talk.feed(completion([2], "") + completion([3], "c")))
    assert [e["choices"][0]["token_ids"] for e in seen] == [[2], [3]]


def test_a_chat_of_which_nothing_was_said_is_asked_anew() -> None:
    stream = watch(CHAT, TALK)
    role = chat({"role": "assistant", "content": ""}, prompt_token_ids=PROMPT)
    stream.feed(role + chat({"content": ""}, [9]))
    assert not stream.has_begun
    stream.begins_anew()
    data = role + chat({"content": ""}, [9]) + chat({"reasoning": "hm"}, [1])
    data += chat({"content": "so"}, [2], prompt_token_ids=None)
    seen = events(stream.feed(data.replace(b"chatcmpl-1", b"chatcmpl-2")))
    assert [e["choices"][0]["delta"] for e in seen] == [{"reasoning": "hm"}, {"content": "so"}]
    assert {e["id"] for e in seen} == {"chatcmpl-1"}
    assert all(e["choices"][0]["token_ids"] is None for e in seen)
    assert stream.tokens() == [9, 1, 2]
    assert stream.has_begun
    assert stream.rest(0, SAID) is None, "who goes on would not know what is reasoning"


def test_what_has_begun() -> None:
    talk = watch(CHAT, TALK)
    talk.feed(chat({"role": "assistant", "content": ""}, prompt_token_ids=PROMPT))
    assert not talk.has_begun
    talk.feed(chat({"content": '"'}, [1]))
    assert talk.has_begun
    assert talk.rest(0, SAID) is not None
    text = watch(COMPLETION, BODY)
    assert not text.has_begun
    text.feed(completion([1], "", PROMPT))
    assert not text.has_begun
    text.begins_anew()
    seen = events(text.feed(completion([1], "", PROMPT) + completion([2], "ä")))
    assert [e["choices"][0]["text"] for e in seen] == ["", "ä"]
    assert all(e["choices"][0]["prompt_token_ids"] is None for e in seen)
    assert text.has_begun
    assert text.tokens() == [1, 2]


def test_half_a_character_behind_silent_tokens_is_computed_again() -> None:
    stream = watch(COMPLETION, BODY)
    stream.feed(completion([1], "a", PROMPT))
    stream.feed(b"".join(completion([2], "") for _ in range(17)))
    assert not stream.is_text_of("a\ufffd")
    assert stream.is_text_of("a")


def test_tokens_without_text_are_computed_again() -> None:
    stream = watch(COMPLETION, BODY)
    stream.feed(completion([1], "a", PROMPT) + completion([2], ""))
    assert not stream.is_text_of("a\ufffd")
    assert stream.is_text_of("a")
    rest = stream.rest(1, SAID)
    assert rest is not None
    assert rest["prompt"] == [*PROMPT, 1]
    stream.goes_on(1)
    assert stream.tokens() == [1]
    stream.feed(completion([2, 3], "ä"))
    assert stream.tokens() == [1, 2, 3]


@pytest.mark.parametrize(
    "prompt_bytes", [b"a price of \xe2", b"\xac a price of \xe2", b"\xe2\x80\xe2"]
)
@pytest.mark.parametrize(
    "given_bytes",
    [
        b"\x82\xac and more",
        b" and more",
        b"\xff\xffand more\xe2\x82",
        b"\x82\xac\xe2\x82\xac\xe2\x82\xac" + 20 * b"\xe2\x82\xac ",
    ],
)
def test_a_prompt_that_ends_in_half_a_character(
    tmp_path: Path, prompt_bytes: bytes, given_bytes: bytes
) -> None:
    """vLLM begins the text with such a prompt; with its own tokenizer, from each place on."""
    write_tokenizer(tmp_path, 1000, 4096)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    # A token for each byte; the first 256 behind the special ones are in the order of `alphabet`.
    alphabet = {bytes_of(tokenizer, token): token for token in range(3, 259)}
    special = tokenizer.token_to_id("<|im_end|>")
    assert special is not None
    prompt = [special, *(alphabet[bytes([byte])] for byte in prompt_bytes)]
    given = [alphabet[bytes([byte])] for byte in given_bytes]

    def texts(before: list[int], tokens: list[int]) -> list[str]:
        decoding = DecodeStream(ids=before, skip_special_tokens=True)
        return [decoding.step(tokenizer, token) or "" for token in tokens]

    async def text_of(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=False))

    whole = texts(prompt, given)
    begun = 0
    for cut in range(1, len(given)):
        stream = watch(COMPLETION, {**BODY, "prompt": prompt})
        for at in range(cut):
            stream.feed(completion([given[at]], whole[at], None if at else prompt))
        if not stream.has_begun:
            continue
        begun += 1
        back = asyncio.run(untold(stream, set(), text_of))
        assert back is not None
        rest = texts(prompt + given[: cut - back], given[cut - back :])
        assert "".join(whole[:cut] + rest) == "".join(whole)
    assert begun > 5


@pytest.mark.parametrize(
    ("prompt", "said", "goes_on"),
    [
        ("zz", ["ab", "ab", "ab"], True),
        ("zz", ["?ab", "ab", "ab"], False),  # more than the tokens, and no prompt to explain it
        ("zz\ufffd", ["zzöab", "ab", "ab"], True),
        ("zz\ufffd", ["zzöa?", "ab", "ab"], False),
        ("zz\ufffd", ["zzöab", "?ab", "ab"], False),  # explained in the first text alone
    ],
)
def test_text_that_is_not_the_tokens_own(prompt: str, said: list[str], goes_on: bool) -> None:
    """Nothing goes on behind it, however alike the ends are."""

    async def text_of(tokens: list[int]) -> str:
        return "".join(prompt if token == 5 else "ab" for token in tokens)

    stream = watch(COMPLETION, BODY)
    for at, text in enumerate(said):
        stream.feed(completion([10 + at], text, None if at else [5]))
    back = asyncio.run(untold(stream, set(), text_of))
    assert back == (0 if goes_on else None)


def bytes_of(tokenizer: Tokenizer, token: int) -> bytes:
    """Of a token of the byte-level alphabet: as it is, or from 256 on by turns."""
    char = tokenizer.id_to_token(token)
    assert char is not None
    odd = [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or b >= 174)]
    return bytes([odd[ord(char) - 256] if ord(char) > 255 else ord(char)])


def test_only_the_end_is_missing() -> None:
    stream = watch(COMPLETION, {**BODY, "stream_options": {"include_usage": True}})
    stream.feed(completion([1, 2], "ab", PROMPT, finish="length"))
    assert stream.is_whole
    usage, done = events(stream.left())
    assert usage["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert usage["id"] == "cmpl-1"
    assert done == b"[DONE]"


@pytest.mark.parametrize(("code", "fails"), [(500, True), (None, True), (400, False)])
def test_an_engine_that_says_it_failed(code: Any, fails: bool) -> None:
    stream = watch(COMPLETION, BODY)
    error = sse({"error": {"message": "EngineCore", "type": "x", "code": code}})
    passed = stream.feed(completion([1], "a", PROMPT) + error + b"data: [DONE]\n\n")
    assert (b"EngineCore" in passed) != fails
    assert b'"a"' in passed
    assert (stream.failure is not None) == fails
    assert stream.is_whole != fails


def test_reasoning_is_not_continued() -> None:
    stream = watch(CHAT, TALK)
    stream.feed(chat({"role": "assistant", "content": ""}, prompt_token_ids=PROMPT))
    stream.feed(chat({"reasoning": "hm"}, [1]))
    assert stream.rest(0, SAID) is None


@pytest.mark.parametrize(
    "more",
    [
        {"stream": False},
        {"n": 2},
        {"stop": ["x"]},
        {"logprobs": 0},
        {"presence_penalty": 0.5},
        {"seed": 1},
        {"temperature": 0.5, "seed": 1},
        {"echo": True},
        {"structured_outputs": {"regex": "a"}},
        {"tools": [{}]},
        {"prompt": ["a", "b"]},
        {"prompt": None, "prompt_embeds": "x"},
        {"return_token_ids": 1},
        {"max_tokens": "5"},
        {"stream_options": 5},
        {"something_new": 1},
    ],
    ids=str,
)
def test_what_does_not_continue_exactly_is_not_watched(more: dict[str, Any]) -> None:
    assert watched(RequestPlan(COMPLETION, {**BODY, **more})) is None


@pytest.mark.parametrize(
    "more",
    [
        {"n": 1, "stop": None, "logprobs": None, "presence_penalty": 0.0},
        {"temperature": 0, "seed": 1},
        {"prompt": [1, 2]},
        {"temperature": 1.0, "top_p": 0.5},
        {"something_new": None},
    ],
    ids=str,
)
def test_what_does_is(more: dict[str, Any]) -> None:
    assert watched(RequestPlan(COMPLETION, {**BODY, **more})) is not None


def test_pictures_are_more_than_their_tokens() -> None:
    parts: list[Any] = [{"type": "text", "text": "x"}]
    assert watched(RequestPlan(CHAT, {**TALK, "messages": [{"role": "user", "content": parts}]}))
    parts.append({"type": "image_url", "image_url": {"url": "data:"}})
    assert (
        watched(RequestPlan(CHAT, {**TALK, "messages": [{"role": "user", "content": parts}]}))
        is None
    )


@pytest.mark.parametrize("path", PAIRED)
@pytest.mark.parametrize("size", [1, 5, 1000])
def test_when_the_stream_of_each_api_is_whole(path: str, size: int) -> None:
    for end in ENDS[path]:
        watcher = Plain(ENDS[path])
        whole = sse({"said": end.decode()}) + end + b"\ndata: {}\n\n"
        for at in range(0, len(whole) - 1, size):
            assert watcher.feed(whole[at : min(at + size, len(whole) - 1)]) or not watcher.is_whole
        assert not watcher.is_whole, "its last event has not ended"
        watcher.feed(whole[-1:])
        assert watcher.is_whole


def test_events_as_long_as_prompts_get() -> None:
    prompt = [*range(100_000, 500_000)]
    stream, whole = watch(COMPLETION, BODY), completion([1], "a", prompt)
    size = 1 << 16
    passed = b"".join(stream.feed(whole[at : at + size]) for at in range(0, len(whole), size))
    assert stream.failure is None
    assert events(passed)[0]["choices"][0]["text"] == "a"
    rest = stream.rest(0, SAID)
    assert rest is not None
    assert rest["prompt"] == [*prompt, 1]
    endless = watch(COMPLETION, BODY)
    for _ in range(17):
        endless.feed(b"x" * (1 << 20))
    assert endless.failure is not None
