"""Clients that send requests all the time and compare each answer with a single engine's."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from rich.console import Console

from disagg.testing.http import client
from disagg.testing.vllm_server import VllmServer, completion


@dataclass
class SteadyLoad:
    """Clients that send greedy requests one after another and compare each answer.

    url: of a router. single: an engine to compare with. tokens: of an answer. counts: right,
    wrong, error.
    """

    url: str
    single: VllmServer
    tokens: int = 24
    counts: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def clients(self, count: int) -> Iterator[None]:
        """Run `count` clients inside the block."""
        self._over.clear()
        threads = [threading.Thread(target=self._client, args=(n,)) for n in range(count)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def report(self, console: Console) -> None:
        """Print the counts and the first errors."""
        console.print(f"answers: {dict(self.counts)}")
        for error in self.errors[:20]:
            console.print(f"  {error}", markup=False)

    def _client(self, seed: int) -> None:
        generator = random.Random(seed)
        while not self._over.is_set():
            length = generator.choice([20, 130, 400, 900])
            prompt = [generator.randrange(300, 1000) for _ in range(length)]
            # The router does not move a stream whose client asks for token ids.
            asked = completion(prompt, max_tokens=self.tokens, return_token_ids=False)
            body = {"model": "tiny", **asked}
            try:
                text = self._streamed(body) if generator.random() < 0.5 else self._whole(body)
            except (httpx.HTTPError, ValueError) as error:
                self.counts["error"] += 1
                self.errors.append(f"{type(error).__name__}: {str(error)[:200]}")
                time.sleep(0.2)
                continue
            right = self.single.complete(prompt, max_tokens=self.tokens)["choices"][0]["text"]
            self.counts["right" if text == right else "wrong"] += 1

    def _whole(self, body: dict[str, Any]) -> str:
        answer = client().post(f"{self.url}/v1/completions", json=body, timeout=120)
        if answer.status_code != 200:
            raise ValueError(f"{answer.status_code}: {answer.text}")
        text: str = answer.json()["choices"][0]["text"]
        return text

    def _streamed(self, body: dict[str, Any]) -> str:
        text, done = "", False
        asked = {**body, "stream": True}
        url = f"{self.url}/v1/completions"
        with client().stream("POST", url, json=asked, timeout=120) as answer:
            for line in answer.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                elif data:
                    event = json.loads(data)
                    if "error" in event:
                        raise ValueError(data)
                    text += event["choices"][0]["text"]
        if not done:
            raise ValueError("the stream ended without [DONE]")
        return text
