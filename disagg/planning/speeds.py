"""The speeds of engines that `disagg bench speeds` measures, and their file.

All times are seconds. A step of an engine, which computes `tokens` of prompts and one token of
each running sequence, takes

    prefill:  step_s + token_s * tokens + token_context_s * attended
    decode:   step_s + sequence_s * sequences + context_token_s * context
              + prompt_token_s * tokens + prompt_token_context_s * attended

`context` is the sum of the running sequences' lengths in tokens. `attended` is the number of tokens
before each prompt token of the step, summed over these tokens: n tokens after p others attend to
n * (p + n / 2). There are no defaults: a speed that is not in the file is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from disagg.config_file import explain
from disagg.errors import ConfigError

Seconds = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]


class SpeedsSection(BaseModel):
    """Base of all parts: frozen, and unknown keys are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_by_name=True
    )


class PrefillSpeed(SpeedsSection):
    """Speed of a prefill engine."""

    request_s: Seconds = Field(
        description="Time of each request during which the engine can do other work"
    )
    step_s: Seconds
    token_s: Annotated[float, Field(gt=0)]
    token_context_s: Seconds
    max_num_batched_tokens: Count
    max_num_seqs: Count

    def alone(self, prompt: int) -> float:
        """Seconds to compute this prompt on an idle engine."""
        steps = -(-prompt // self.max_num_batched_tokens)
        work = self.token_s * prompt + self.token_context_s * prompt * prompt / 2
        return self.request_s + steps * self.step_s + work


class DecodeSpeed(SpeedsSection):
    """Speed of a decode engine."""

    request_s: Seconds = Field(
        description="Time of each request during which the engine can do other work"
    )
    step_s: Annotated[float, Field(gt=0)]
    sequence_s: Seconds
    context_token_s: Seconds
    prompt_token_s: Annotated[float, Field(gt=0)]
    prompt_token_context_s: Seconds
    max_num_batched_tokens: Count
    max_num_seqs: Count
    kv_tokens: Count = Field(description="Tokens that its KV cache has room for")

    def step(self, sequences: int, context: int) -> float:
        """Seconds of a step that computes no prompt."""
        return self.step_s + self.sequence_s * sequences + self.context_token_s * context

    def between_alone(self, prompt: int, output: int) -> float:
        """Mean seconds between the tokens of an answer on an otherwise idle engine."""
        return self.step(1, 0) + self.context_token_s * (prompt + output / 2)

    def prompt_alone(self, prompt: int) -> float:
        """Seconds to compute this prompt and its first token on an idle decode engine."""
        steps = -(-prompt // self.max_num_batched_tokens)
        work = self.prompt_token_s * prompt + self.prompt_token_context_s * prompt * prompt / 2
        return self.request_s + steps * self.step_s + work


class HandoffSpeed(SpeedsSection):
    """Speed of a handoff."""

    latency_s: Seconds
    bytes_per_token: Annotated[float, Field(gt=0)]
    bytes_per_s: Annotated[float, Field(gt=0)] = Field(description="Speed of one handoff")
    parallel: Count = Field(description="Handoffs that one decode engine runs at once")

    def takes(self, prompt: int) -> float:
        """Seconds to move the KV cache of this prompt."""
        return self.latency_s + prompt * self.bytes_per_token / self.bytes_per_s


class Speeds(SpeedsSection):
    """The whole file. `measured` describes the measurement; it is only printed."""

    measured: dict[str, Any] = Field(min_length=1)
    prefill: PrefillSpeed
    decode: DecodeSpeed
    # Files of 0.1 call it "handover".
    handoff: HandoffSpeed = Field(validation_alias=AliasChoices("handoff", "handover"))
    router_s: Seconds = Field(description="Time that the router adds to a request")

    def first_token_alone(self, prompt: int, *, local: bool) -> float:
        """Seconds to the first token on idle engines. `local`: decode computes the prompt."""
        if local:
            return self.router_s + self.decode.prompt_alone(prompt)
        handed = self.router_s + self.prefill.alone(prompt) + self.handoff.takes(prompt)
        return handed + self.decode.request_s + self.decode.step(1, prompt)


def load(path: Path) -> Speeds:
    """Read a file of speeds. Raises ConfigError with one line for each problem."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; name a file that `disagg bench speeds` wrote"
        ) from error
    except ValueError as error:
        raise ConfigError(
            f"{path}: not JSON ({error}); name a file that `disagg bench speeds` wrote"
        ) from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: not a JSON object; `disagg bench speeds` writes one")
    try:
        return Speeds.model_validate(content)
    except ValidationError as error:
        raise ConfigError([f"{path}: {line}" for line in explain(error, Speeds)]) from error


def save(path: Path, speeds: Speeds) -> None:
    """Write the file that `load` reads."""
    path.write_text(json.dumps(speeds.model_dump(), indent=2) + "\n", encoding="utf-8")
