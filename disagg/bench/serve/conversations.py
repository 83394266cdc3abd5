"""The load of `disagg bench serve --conversations`, and what of it an ideal cache would compute.

Each conversation has several turns. The prompt of a turn is the whole history: the prompt of the
turn before, the tokens that the engine really answered, and the user's new tokens. The first prompt
begins with a text that several conversations share, as system prompts and tools do. Pure functions;
`load.py` sends.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from disagg.bench.serve.trace import TOKENS

SOURCES = "vllm:prompt_tokens_by_source"
"""vLLM's counter that `counted` reads."""
Samples: TypeAlias = Mapping[str, float]
"""An engine's metrics by `name{labels}`."""


@dataclass(frozen=True)
class Talk:
    """What conversations are like. Lengths: tokens.

    `turns`: requests of each. `think_s`: mean seconds between an answer's end and the next request,
    drawn from an exponential distribution. `shared_prompts`: different texts that conversations
    begin with, each of `shared_tokens`. `turn_tokens`: what the user says in each turn.
    """

    conversations: int
    turns: int = 10
    think_s: float = 2.0
    shared_prompts: int = 2
    shared_tokens: int = 1024
    turn_tokens: int = 64
    answer_tokens: int = 32

    @property
    def longest(self) -> int:
        """Tokens of a conversation, prompt and answers."""
        return self.shared_tokens + self.turns * (self.turn_tokens + self.answer_tokens)

    def problems(self) -> list[str]:
        """What of it makes no sense, by option."""
        least = {
            "--conversations": self.conversations,
            "--turns": self.turns,
            "--shared-prompts": self.shared_prompts,
            "--turn-tokens": self.turn_tokens,
            "--answer-tokens": self.answer_tokens,
        }
        found = [f"{name}: {n} — must be at least 1" for name, n in least.items() if n < 1]
        if min(self.think_s, self.shared_tokens) < 0:
            found.append("--think-s and --shared-tokens: must not be below 0")
        return found


@dataclass(frozen=True)
class Turn:
    """One request. `waits_s`: seconds after the answer before it. `new`: token ids that follow the
    history."""

    waits_s: float
    new: Sequence[int]
    output_tokens: int


@dataclass(frozen=True)
class Conversation:
    """`at`: seconds from the start of the load to its first request."""

    at: float
    turns: Sequence[Turn]


def conversations(talk: Talk, rate: float, seed: int, key: str) -> list[Conversation]:
    """They begin as a Poisson process of `rate` a second, the first one at once.

    `seed`: of all times; the same at every rate, only closer together. `key`: of all tokens; with
    another key no two prompts share a beginning.
    """
    times, tokens = random.Random(seed), random.Random(key)
    shared = [tokens.choices(TOKENS, k=talk.shared_tokens) for _ in range(talk.shared_prompts)]
    found, at = list[Conversation](), 0.0
    for number in range(talk.conversations):
        turns = []
        for turn in range(talk.turns):
            wait = times.expovariate(1.0) * talk.think_s
            new = tokens.choices(TOKENS, k=talk.turn_tokens)
            if turn == 0:
                new = [*shared[number % len(shared)], *new]
            turns.append(Turn(wait if turn else 0.0, new, talk.answer_tokens))
        found.append(Conversation(at, turns))
        at += times.expovariate(1.0) / rate
    return found


# ---- what is computed --------------------------------------------------------------------------


@dataclass(frozen=True)
class Exchange:
    """One request as it was sent and answered. `sent_s`: when, on any one clock."""

    sent_s: float
    prompt: Sequence[int]
    answer: Sequence[int]


def unavoidable(exchanges: Sequence[Exchange], block: int) -> int:
    """Prompt tokens that one engine with an endless cache would compute, if it served these
    requests one after another as they were sent.

    `block`: tokens of vLLM's blocks. Each distinct block, with all before it, is computed once over
    the entire load. A prompt's rest behind its last whole block is always computed, and so is its
    last token, with its block. What an answer leaves in the cache costs no prompt token: it was
    computed as an answer. The last token of an answer is in no cache, for no step has read it.
    """
    known, total = set[int](), 0
    for exchange in sorted(exchanges, key=lambda one: one.sent_s):
        prompt = exchange.prompt
        keys = _keys([*prompt, *exchange.answer[:-1]], block)
        held = 0
        while held < (len(prompt) - 1) // block and keys[held] in known:
            held += 1
        total += len(prompt) - held * block
        known.update(keys)
    return total


def _keys(ids: Sequence[int], block: int) -> list[int]:
    """One for each whole block, which stands for it and all before it."""
    keys, parent = list[int](), 0
    for at in range(0, len(ids) - block + 1, block):
        parent = hash((parent, *ids[at : at + block]))
        keys.append(parent)
    return keys


@dataclass(frozen=True)
class TokenCounts:
    """Prompt tokens of a run. `sent`: by the clients. The others are sums over all engines, by
    their own counters. Where prefill and decode are apart, a prompt passes through two engines, so
    they add up to more than `sent`.

    `computed`: run through the model; at prefill, and at decode what was not handed off. `cached`:
    found in the engine's own cache. `moved`: had from other engines. `unavoidable`: see there.
    """

    sent: int
    computed: int
    cached: int
    moved: int
    unavoidable: int

    @property
    def over(self) -> float:
        """Computed tokens over the unavoidable ones; 1 is ideal."""
        return self.computed / max(1, self.unavoidable)


def counted(
    before: Sequence[Samples], after: Sequence[Samples], exchanges: Sequence[Exchange], block: int
) -> TokenCounts:
    """From the engines' metrics (`vllm:prompt_tokens_by_source`) before and after a run."""

    def grown(source: str) -> int:
        name = f"{SOURCES}_total{{source={source}}}"
        sums = [sum(one.get(name, 0.0) for one in samples) for samples in (before, after)]
        return round(sums[1] - sums[0])

    return TokenCounts(
        sent=sum(len(one.prompt) for one in exchanges),
        computed=grown("local_compute"),
        cached=grown("local_cache_hit"),
        moved=grown("external_kv_transfer"),
        unavoidable=unavoidable(exchanges, block),
    )
