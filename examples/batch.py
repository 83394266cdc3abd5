"""Many requests from a file: OpenAI's batch format in, OpenAI's batch format out.

    .venv/bin/python examples/batch.py requests.jsonl answers.jsonl --concurrency 32

A line of the input; each `custom_id` must be unique:

    {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions",
     "body": {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}}

Answers are written as they come, each with its `custom_id`. After an interruption, run it again: it
asks only for answers that are missing. It retries after 429, after 500 and above, and after lost
connections, with growing pauses. A request that still fails, or is refused, goes to
`answers.jsonl.errors`; the exit status is then 1, and the next run tries it again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import httpx

TRIES = 6
LONGEST_PAUSE_S = 30.0


def requests_in(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a batch file; a wrong one ends the program with its number."""
    seen: set[str] = set()
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                request = json.loads(line)
                name, url = request["custom_id"], str(request["url"])
                streams = request["body"].get("stream")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise SystemExit(f"{path}:{number}: {error!r}; see --help for a line") from None
            if name in seen:
                raise SystemExit(f"{path}:{number}: custom_id {name!r} is there twice")
            if request.get("method", "POST") != "POST" or not url.startswith("/v1/"):
                raise SystemExit(f"{path}:{number}: only POST to /v1/... can be in a batch")
            if streams:
                raise SystemExit(f"{path}:{number}: body.stream cannot be in a batch; remove it")
            seen.add(name)
            yield request


def answered_in(path: Path) -> set[str]:
    """What an earlier run has written; half a line, from when it was killed, is cut off."""
    if not path.exists():
        return set()
    with path.open("rb+") as file:
        lines = file.read().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            file.truncate(sum(map(len, lines[:-1])))
            lines.pop()
    return {json.loads(line)["custom_id"] for line in lines}


async def answer(client: httpx.AsyncClient, request: dict[str, Any]) -> dict[str, Any]:
    """The line of the output: the last answer of up to `TRIES`, or why there is none."""
    line: dict[str, Any] = {}
    for attempt in range(TRIES):
        pause = min(LONGEST_PAUSE_S, 0.5 * 2**attempt) * random.uniform(0.5, 1)
        try:
            got = await client.post(request["url"].removeprefix("/v1"), json=request["body"])
        except httpx.TransportError as error:
            line = _line(request, error=f"{type(error).__name__}: {error}")
        else:
            line = _line(request, got)
            if got.status_code != 429 and got.status_code < 500:
                break
            told = got.headers.get("retry-after", "")
            pause = min(LONGEST_PAUSE_S, max(pause, float(told) if told.isdigit() else 0.0))
        if attempt + 1 < TRIES:
            await asyncio.sleep(pause)
    return line


def _line(
    request: dict[str, Any], got: httpx.Response | None = None, error: str | None = None
) -> dict[str, Any]:
    response = None
    if got is not None:
        try:
            body = got.json()
        except ValueError:  # a proxy's own page, for instance
            body = {"text": got.text}
        response = {
            "status_code": got.status_code,
            "request_id": got.headers.get("x-request-id"),
            "body": body,
        }
    return {
        "id": f"batch_req_{os.urandom(12).hex()}",
        "custom_id": request["custom_id"],
        "response": response,
        "error": {"code": "no_answer", "message": error} if error else None,
    }


async def run(options: argparse.Namespace, out: TextIO, errors: TextIO) -> int:
    """Ask for all that has no answer yet; returns how many have none still."""
    answered = answered_in(options.output)
    left = (r for r in requests_in(options.input) if r["custom_id"] not in answered)
    done = failed = 0

    async def work(client: httpx.AsyncClient) -> None:
        nonlocal done, failed
        for request in left:  # all workers draw from this one
            line = await answer(client, request)
            good = (line["response"] or {}).get("status_code") == 200
            done, failed = done + good, failed + (not good)
            print(json.dumps(line, ensure_ascii=False), file=out if good else errors, flush=True)

    limits = httpx.Limits(max_connections=options.concurrency)
    headers = {"authorization": f"Bearer {options.key}"} if options.key else {}
    async with (
        httpx.AsyncClient(
            base_url=options.url, headers=headers, limits=limits, timeout=options.timeout
        ) as client,
        asyncio.TaskGroup() as workers,
    ):
        for _ in range(options.concurrency):
            workers.create_task(work(client))
    print(f"{len(answered)} answered before, {done} now, {failed} failed", file=sys.stderr)
    return failed


def main() -> int:
    """Exit status 0 if all lines have an answer now."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", help="one of the router's API keys, if it has any")
    parser.add_argument("--concurrency", type=int, default=16, help="requests at once")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one answer")
    options = parser.parse_args()
    for _ in requests_in(options.input):
        pass  # a wrong line shall be told before anything is asked
    errors_path = options.output.with_name(f"{options.output.name}.errors")
    with options.output.open("a", encoding="utf-8") as out, errors_path.open("w") as errors:
        failed = asyncio.run(run(options, out, errors))
    if not failed:
        errors_path.unlink()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
