"""The sections of the model and of the engines that serve it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    model_validator,
)

from disagg.config.base import MAX_REPLICAS, Checkpoint, Environment, Section
from disagg.config_units import Seconds


class ModelSection(Section):
    """Which checkpoint to serve."""

    path: Checkpoint = Field(description="Checkpoint folder, or a name on a model hub")
    served_name: str | None = Field(None, description="The model's name in the API; default: path")
    tokenizer: Checkpoint | None = None
    revision: str | None = None
    trust_remote_code: bool = False


class ResourcesSection(Section):
    """The resources that one engine requests from Ray."""

    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    custom: dict[str, float] = Field(default_factory=dict, description="Ray's custom resources")
    labels: dict[str, str] = Field(
        default_factory=dict,
        description="Labels that the engine's Ray node must have, as Ray's label selectors",
    )


class EngineSection(Section):
    """Settings of all engines. A pool's own values override them."""

    args: dict[str, Any] = Field(
        default_factory=dict, repr=False, description="vLLM engine arguments, by vLLM's names"
    )
    env: Environment = Field(
        default_factory=dict, repr=False, description="Environment variables of engines"
    )
    startup_timeout_s: Seconds = Field(
        600.0, gt=0, description="Seconds in which an engine must start"
    )
    hang_timeout_s: Seconds = Field(
        120.0,
        gt=3,
        description="An engine that makes no progress for this many seconds is restarted",
    )
    max_restarts: int = Field(
        5, ge=0, description="Restarts in a row, after which an engine that dies is given up"
    )
    drain_timeout_s: Seconds = Field(
        300.0, ge=0, description="Seconds that an engine which drains may finish its requests"
    )
    placement: Literal["near", "spread"] = Field(
        "near", description="near: prefill and decode share nodes where there is room"
    )


class AutoscaleSection(Section):
    """How the number of engines of a pool follows its load."""

    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(ge=1, le=MAX_REPLICAS)
    target_queue: float = Field(
        8.0, gt=0, description="Requests that one engine should have, running and waiting"
    )
    target_kv_usage: float = Field(
        0.8, gt=0, le=1, description="Share of its KV cache that one engine should use"
    )
    cooldown_s: Seconds = Field(
        60.0, ge=0, description="The pool shrinks when an engine was not needed for these seconds"
    )

    @model_validator(mode="after")
    def _in_order(self) -> AutoscaleSection:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas ({self.min_replicas}) is above max_replicas ({self.max_replicas})"
            )
        return self


class PoolSection(Section):
    """The engines of one role."""

    replicas: int = Field(
        1,
        ge=1,
        le=MAX_REPLICAS,
        description="Number of engines, or of groups of data_parallel_size engines; with "
        "autoscale, at the start",
    )
    autoscale: AutoscaleSection | None = None
    resources: ResourcesSection = ResourcesSection()
    args: dict[str, Any] = Field(
        default_factory=dict,
        repr=False,
        description="vLLM engine arguments; override engine.args",
    )
    env: Environment = Field(
        default_factory=dict,
        repr=False,
        description="Environment variables; override engine.env",
    )

    @model_validator(mode="after")
    def _within(self) -> PoolSection:
        scale = self.autoscale
        if scale and not scale.min_replicas <= self.replicas <= scale.max_replicas:
            raise ValueError(
                f"replicas ({self.replicas}) is not within autoscale.min_replicas and "
                f"max_replicas ({scale.min_replicas} to {scale.max_replicas})"
            )
        return self
