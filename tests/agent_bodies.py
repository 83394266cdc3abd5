"""Requests as today's agents and SDKs send them, written from their public formats.

The tools' results are files of this repository: prose, code, JSON and logs of real sizes.
"""

from __future__ import annotations

import base64
import io
import json
import struct
import wave
import zlib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
Body = dict[str, Any]
SYSTEM = (
    "You are a coding agent that works in a user's repository. Read what you need, change as "
    "little as possible, and run the tests before you say that you are done. Use the tools; never "
    "guess what a file holds. Answer in plain English, with file names and line numbers.\n"
)
_TEXT = {"type": "string", "description": "Absolute path of the file, or a pattern with wildcards"}
_NUMBER = {"type": "integer", "description": "The line to begin with, counted from 1"}
_FLAG = {"type": "boolean", "description": "Whether upper and lower case are the same"}
TOOLS = {
    "Read": ("Read a file with line numbers. Long files are cut; read on with offset.", {
        "file_path": _TEXT, "offset": _NUMBER, "limit": _NUMBER}),
    "Write": ("Write a file, which is replaced if it exists. Read it first.", {
        "file_path": _TEXT, "content": _TEXT}),
    "Edit": ("Replace one text of a file by another. The old text must be there once.", {
        "file_path": _TEXT, "old_string": _TEXT, "new_string": _TEXT, "replace_all": _FLAG}),
    "Grep": ("Search all files for a regular expression, with lines around each match.", {
        "pattern": _TEXT, "path": _TEXT, "glob": _TEXT, "ignore_case": _FLAG, "context": _NUMBER}),
    "Bash": ("Run a command in a shell that keeps its folder and its variables.", {
        "command": _TEXT, "timeout": _NUMBER, "run_in_background": _FLAG}),
}  # fmt: skip
FILES = (
    "disagg/router/request/legs.py",
    "disagg/transport/control/lease.py",
    "docs/architecture.md",
    "serve_configs/cpu-1p1d.yaml",
    "pyproject.toml",
    "disagg/router/server/ui.html",
    "docs/router.md",
    "Makefile",
    "disagg/config_file.py",
    "disagg/dashboards/disagg.json",
    "tests/conftest.py",
    "README.md",
)


def _schema(properties: Body) -> Body:
    return {"type": "object", "properties": properties, "required": [next(iter(properties))]}


def _file(name: str, most: int = 6000) -> str:
    lines = (ROOT / name).read_text().splitlines()
    numbered = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines, 1))
    return numbered[:most]


def chat_agent(calls: int = 12) -> Body:
    """OpenAI's chat API: an agent that has called tools `calls` times."""
    messages: list[Body] = [
        {"role": "system", "content": SYSTEM * 4},
        {"role": "user", "content": "The router forgets leases when decode dies. Find out why."},
    ]
    for number in range(calls):
        name = FILES[number % len(FILES)]
        arguments = json.dumps({"file_path": f"/src/{name}", "offset": 1, "limit": 2000})
        call = {"name": "Read", "arguments": arguments}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "reasoning": f"The answer may be in {name}, which I have not seen yet.",
                "tool_calls": [{"id": f"call_{number:08}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{number:08}", "content": _file(name)},
        ]
    tools = [
        {
            "type": "function",
            "function": {"name": name, "description": text, "parameters": _schema(properties)},
        }
        for name, (text, properties) in TOOLS.items()
    ]
    return {"model": "tiny", "messages": messages, "tools": tools, "tool_choice": "auto"}


def messages_agent(calls: int = 12) -> Body:
    """Anthropic's Messages API: blocks of thinking, tool use and results."""
    messages: list[Body] = [
        {"role": "user", "content": [{"type": "text", "text": "Find the slowest test, and why."}]}
    ]
    for number in range(calls):
        name = FILES[number % len(FILES)]
        thought = f"The user wants the slowest test. I look at {name} next, since it may tell."
        asked = {"file_path": f"/src/{name}", "limit": 400}
        found = {"type": "text", "text": _file(name)}
        use, result = f"toolu_{number:020}", {"type": "tool_result", "content": [found]}
        messages += [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": thought, "signature": "c2ln" * 90},
                    {"type": "tool_use", "id": use, "name": "Read", "input": asked},
                ],
            },
            {"role": "user", "content": [{**result, "tool_use_id": use}]},
        ]
    tools = [
        {"name": name, "description": text, "input_schema": _schema(properties)}
        for name, (text, properties) in TOOLS.items()
    ]
    system = [{"type": "text", "text": SYSTEM * 4, "cache_control": {"type": "ephemeral"}}]
    body = {"model": "tiny", "max_tokens": 1024, "system": system}
    return {**body, "messages": messages, "tools": tools}


def responses_agent(calls: int = 12) -> Body:
    """OpenAI's Responses API: items of reasoning, function calls and their outputs."""
    items: list[Body] = [
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "Explain how a lease ends."}]},
    ]  # fmt: skip
    for number in range(calls):
        name = FILES[number % len(FILES)]
        asked = json.dumps({"command": f"sed -n 1,200p {name}"})
        call = {"type": "function_call", "call_id": f"call_{number:08}", "name": "Bash"}
        output = {"type": "function_call_output", "call_id": f"call_{number:08}"}
        items += [{**call, "arguments": asked}, {**output, "output": _file(name)}]
    tools = [
        {
            "type": "function",
            "name": name,
            "description": text,
            "parameters": _schema(properties),
            "strict": False,
        }
        for name, (text, properties) in TOOLS.items()
    ]
    return {"model": "tiny", "instructions": SYSTEM * 4, "input": items, "tools": tools}


def long_document() -> Body:
    """A chat about a long text."""
    text = "\n\n".join((ROOT / "docs" / name).read_text() for name in ("transports.md", "tiers.md"))
    asked = f"{text}\n\nWhich tiers keep blocks when the engine ends?"
    return {"model": "tiny", "messages": [{"role": "user", "content": asked}]}


def conversation(turns: int = 40) -> Body:
    """Many short turns, as in a messenger."""
    said = ("How do I boil an egg?", "Put it in boiling water for seven minutes, then cool it.")
    messages = [
        {"role": ("user", "assistant")[turn % 2], "content": f"{said[turn % 2]} ({turn})"}
        for turn in range(turns - 1 + turns % 2)
    ]
    return {"model": "tiny", "messages": messages}


def languages() -> Body:
    """A chat in five languages that are not English."""
    said = (
        "大規模言語モデルは、プロンプトを読む段階と答えを書く段階に分けて動かすことができます。",
        "大型语言模型可以把读取提示和写出答案两个阶段分开运行。",
        "Большие языковые модели читают запрос и пишут ответ на разных машинах.",
        "Große Sprachmodelle lesen die Anfrage und schreiben die Antwort auf zwei Maschinen.",
        "대규모 언어 모델은 프롬프트를 읽는 단계와 답을 쓰는 단계를 나눌 수 있습니다.",
    )
    return {"model": "tiny", "messages": [{"role": "user", "content": " ".join(said * 8)}]}


def png(width: int, height: int) -> str:
    """An image without content, as a data URL."""

    def chunk(name: bytes, data: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + crc

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes((width + 1) * height)))
    data = b"\x89PNG\r\n\x1a\n" + head + pixels + chunk(b"IEND", b"")
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def wav(seconds: float) -> str:
    """Silence, as base64."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16_000)
        sound.writeframes(bytes(int(seconds * 32_000)))
    return base64.b64encode(file.getvalue()).decode()
