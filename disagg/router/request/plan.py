"""What a client's request asks for, understood once.

A `RequestPlan` is made from the parsed body when the request arrives. Pairing, the legs, failover
and the first token from prefill read the plan. Nothing else looks into the body: `api/bodies.py`
alone copies it, to write the bodies of the legs. A question that a policy never asks is never
answered: each answer is worked out at its first use and kept.

For each thing that the router may do with a request, the plan says why not, or None if it may:
`not_split`, `not_resumed`, `not_replayed`, `not_begun_at_prefill`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from disagg.config import MediaSection
from disagg.router.api import paths, prompt_length, prompt_parts
from disagg.router.api.errors import Style
from disagg.router.api.prompt_length import Length, Prefixes, Scales
from disagg.router.api.prompt_parts import Media, Part
from disagg.router.caches.block_keys import PromptBlocks
from disagg.router.request import resumable

_COMPLETION_TOKENS = 16  # of a completion without max_tokens
_USAGE_OPTIONS = {"include_usage", "continuous_usage_stats"}
# Fields of a completion with which an engine reads other tokens than those sent.
_CHANGE_PROMPT = ("truncate_prompt_tokens", "prompt_embeds")
T = TypeVar("T")


class _Answer(Generic[T]):
    """An attribute of a plan that is worked out at its first use and kept.

    `functools.cached_property` does the same, but takes a lock in Python 3.11.
    """

    def __init__(self, work_out: Callable[[RequestPlan], T]) -> None:
        self._work_out, self._name = work_out, work_out.__name__
        self.__doc__ = work_out.__doc__

    def __get__(self, plan: RequestPlan, owner: type[RequestPlan]) -> T:
        answer = self._work_out(plan)
        # Found before this descriptor from now on. Plans are frozen for everybody else.
        object.__setattr__(plan, self._name, answer)
        return answer


@dataclass(frozen=True)
class Estimates:
    """How prompts are measured. `media`: what images and the like count. `scales`: learned from
    the lengths that engines report."""

    media: MediaSection = field(default_factory=MediaSection)
    scales: Scales = field(default_factory=Scales)


@dataclass(frozen=True)
class RequestPlan:
    """One request. `path`: one of `paths.PAIRED`, or any other that decode serves alone.

    `body`: the client's, without transfer params. `headers`: the client's.
    `client`: the name of its key.
    """

    path: str
    body: dict[str, Any] = field(repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    client: str | None = None
    estimates: Estimates = field(default_factory=Estimates, repr=False)

    def rest(self, body: dict[str, Any]) -> RequestPlan:
        """The completion that goes on with this request's answer."""
        return replace(self, path=paths.COMPLETION, body=body)

    # ---- what it is ----------------------------------------------------------------------------

    @property
    def is_chat(self) -> bool:
        """Whether it asks `/v1/chat/completions`."""
        return self.path == paths.CHAT

    @property
    def is_stream(self) -> bool:
        """Whether the answer is to be an event stream."""
        return self.body.get("stream") is True

    @property
    def model(self) -> Any:
        """The model's name as the client gave it."""
        return self.body.get("model")

    @property
    def error_style(self) -> Style:
        """How this API's errors look in the middle of a stream."""
        return paths.style(self.path)

    # ---- its prompt ----------------------------------------------------------------------------

    @_Answer
    def tokens(self) -> int:
        """About how many tokens the prompt has."""
        tokens = self.estimates.scales.tokens(self._length, self.model)
        most = _number(self.body, "truncate_prompt_tokens")
        return min(tokens, int(most)) if most is not None and most > 0 else tokens

    @_Answer
    def prefixes(self) -> Prefixes:
        """Keys of the prompt's prefixes."""
        shape = prompt_parts.shape(self.body)
        return prompt_length.prefixes(shape, self._parts, self.estimates.media)

    @_Answer
    def blocks(self) -> PromptBlocks | None:
        """The prompt's blocks, if its token ids are known: the client sent them, or see
        `reads`."""
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
            prompt = prompt[0]
        if self.path != paths.COMPLETION or not prompt or not prompt_parts.is_tokens(prompt):
            return None
        if any(self.body.get(field) is not None for field in _CHANGE_PROMPT):
            return None
        return self._blocks_of(prompt)

    def reads(self, ids: Sequence[int]) -> None:
        """An engine told the prompt's token ids."""
        object.__setattr__(self, "blocks", self._blocks_of(ids))  # as `_Answer` does

    def _blocks_of(self, ids: Sequence[int]) -> PromptBlocks | None:
        salt = self.body.get("cache_salt")
        try:
            return PromptBlocks(ids, salt if isinstance(salt, str) else None)
        except ValueError:
            return None  # the engine will refuse it

    @property
    def has_media(self) -> bool:
        """Whether the prompt has images and the like."""
        return any(isinstance(part, Media) for part in self._parts)

    def has(self, tokens: int) -> None:
        """An engine counted the prompt's tokens."""
        self.estimates.scales.learn(self._length, self.model, tokens)

    @_Answer
    def _parts(self) -> Sequence[Part]:
        return list(prompt_parts.parts(self.body))

    @_Answer
    def _length(self) -> Length:
        return prompt_length.measure(self._parts, self.estimates.media)

    # ---- how it draws --------------------------------------------------------------------------

    @property
    def is_greedy(self) -> bool:
        """Whether each token is the likeliest one, so that no seed changes it."""
        return self.body.get("temperature") == 0

    # ---- what its stream shows -----------------------------------------------------------------

    @_Answer
    def shows_ids(self) -> bool:
        """Whether the client asked for token ids."""
        return self.body.get("return_token_ids") is True

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with an event of its token counts."""
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    # ---- its limits; only of a request that can be resumed --------------------------------------

    @property
    def min_tokens(self) -> int:
        """The fewest tokens that the answer may have."""
        least: int = self.body.get("min_tokens", 0)
        return least

    def max_tokens(self, reports: Mapping[str, str], prompt: int) -> int | None:
        """The most tokens that may follow a prompt of `prompt` tokens, as vLLM 0.32 reads it.

        `reports`: by the decode engine, of itself. None: the client sets no limit, and the engine
        did not report how many fit.
        """
        limit: int | None = self.body.get("max_tokens")
        if not self.is_chat:
            return _COMPLETION_TOKENS if limit is None else limit
        if self.body.get("max_completion_tokens") is not None:
            limit = self.body["max_completion_tokens"]
        most = reports.get("max_model_len", "")
        if limit is not None or not most.isdecimal():
            return limit
        room, usual = int(most) - prompt, reports.get("max_tokens", "")  # of the generation config
        return min(room, int(usual)) if usual.isdecimal() else room

    # ---- what the router may do with it --------------------------------------------------------

    @_Answer
    def not_split(self) -> str | None:
        """Why a prefill leg is of no use: a label of `disagg_router_local_total`."""
        body = self.body
        if self._depends_on_one_engine:
            return "stateful"
        if _are_several_prompts(body.get("prompt")):
            return "several_prompts"  # one params object cannot stand for several leases
        if body.get("prompt_logprobs") is not None or (
            body.get("echo") and body.get("logprobs") is not None
        ):
            return "prompt_logprobs"  # decode computes every prompt position anyhow
        if body.get("use_beam_search"):
            return "beam_search"
        if body.get("prompt_embeds") is not None:
            return "prompt_embeds"
        return None

    @_Answer
    def not_resumed(self) -> str | None:
        """Why another engine cannot continue its stream from the tokens sent: the field of the
        body that stands against it."""
        return resumable.obstacle(self.path, self.body)

    @_Answer
    def not_replayed(self) -> str | None:
        """Why asking once more need not give the same stream: the field that decides it."""
        if not self.is_stream:
            return "stream"
        if self._depends_on_one_engine:
            return "stateful"
        if _number(self.body, "temperature") == 0 or _number(self.body, "top_k") == 1:
            return None
        if self.path == paths.MESSAGES:
            return "temperature"  # this API has no seed
        return None if _number(self.body, "seed") is not None else "seed"

    @_Answer
    def not_begun_at_prefill(self) -> str | None:
        """Why its stream cannot begin with prefill's token: the field that stands against it."""
        if self.not_resumed is not None:
            return self.not_resumed
        if self.body.get("add_generation_prompt", True) is not True:
            return "add_generation_prompt"  # the token may not be the assistant's
        options = self.body.get("stream_options") or {}
        is_known = options.keys() <= _USAGE_OPTIONS and all(
            isinstance(value, bool) for value in options.values()
        )
        if not is_known or options.get("continuous_usage_stats"):
            return "stream_options"
        return None

    @_Answer
    def _depends_on_one_engine(self) -> bool:
        """Whether it continues what one engine keeps, leaves something there, or lets the engine
        call tools by itself, after which the prompt is another one."""
        if self.path != paths.RESPONSES:
            return False
        tools = self.body.get("tools")
        return bool(
            self.body.get("previous_response_id")
            or self.body.get("background")
            or any(
                not isinstance(tool, dict) or tool.get("type") != "function"
                for tool in (tools if isinstance(tools, list) else ())
            )
        )


def _are_several_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and len(prompt) > 1 and not prompt_parts.is_tokens(prompt)


def _number(body: Mapping[str, Any], name: str) -> float | None:
    value = body.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
