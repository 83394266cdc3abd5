"""The sections of a router that say what becomes of a request: limits, pairing, shares."""

from __future__ import annotations

from typing import Literal

from pydantic import (
    Field,
    model_validator,
)

from disagg.config.base import Role, Section
from disagg.config_units import Bytes, Seconds


class ModelLimitsSection(Section):
    """Limits of the requests for one model. Each router process counts on its own."""

    max_prompt_tokens: int | None = Field(
        None,
        gt=0,
        description="Longest prompt. Texts and media are estimated, token ids counted",
    )
    max_in_flight: int = Field(4096, gt=0, description="Running requests; further requests wait")
    max_in_flight_per_engine: int = Field(
        512, gt=0, description="Running requests of one engine; further requests wait"
    )
    max_queued: int = Field(
        1024, ge=0, description="Waiting requests; further requests get status 429"
    )
    queue_timeout_s: Seconds = Field(
        30.0, gt=0, description="Seconds that a request may wait; then it gets status 429"
    )
    connect_timeout_s: Seconds = Field(5.0, gt=0, description="Seconds to connect to an engine")
    prefill_timeout_s: Seconds = Field(300.0, gt=0, description="Seconds of the prefill leg")
    first_byte_timeout_s: Seconds = Field(
        600.0, gt=0, description="Seconds until an engine's first byte"
    )
    between_bytes_timeout_s: Seconds = Field(
        120.0, gt=0, description="Seconds between two reads from an engine"
    )


class LimitsSection(ModelLimitsSection):
    """Limits of the router. Each router process counts on its own."""

    max_body_bytes: Bytes = Field(32 << 20, gt=0, description="Largest body of a request")
    max_receiving_bytes: Bytes = Field(
        256 << 20,
        gt=0,
        description="Bytes of the bodies over 64 KiB of all open requests together; a body that "
        "would exceed it gets status 503",
    )
    max_json_elements: int = Field(
        2_000_000,
        gt=0,
        description="Most values in a JSON body; a tenth of it is the most strings, arrays and "
        "objects",
    )
    receive_timeout_s: Seconds = Field(
        60.0, gt=0, description="Seconds in which a client must send its request"
    )
    keep_alive_s: Seconds = Field(
        75.0,
        gt=0,
        description="Seconds for which a client's connection without a request stays open; more "
        "than a load balancer in front keeps it",
    )
    unread_timeout_s: Seconds = Field(
        120.0, gt=0, description="Seconds for which a client may read nothing of its answer"
    )
    drain_s: Seconds = Field(
        30.0, ge=0, description="Seconds that running requests may go on after SIGTERM"
    )

    @model_validator(mode="after")
    def _holds_one_body(self) -> LimitsSection:
        if self.max_receiving_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_receiving_bytes ({self.max_receiving_bytes}) is below max_body_bytes "
                f"({self.max_body_bytes}); raise it, or lower max_body_bytes"
            )
        return self


PolicyName = Literal[
    "round_robin", "least_loaded", "prefix_affinity", "session_affinity", "cache_aware"
]
Follow = bool | Literal["auto"]
"""Whether decode follows a prompt's lease; auto: only where that can pay."""


class MediaSection(Section):
    """About how many tokens media count in a prompt. It depends on the model."""

    pixels_per_token: int | None = Field(
        784,
        gt=0,
        description="Pixels of an image for each token. null: every image counts image_tokens",
    )
    image_tokens: int = Field(1024, ge=0, description="Tokens of an image of unknown size")
    max_image_tokens: int = Field(16384, gt=0, description="Most tokens of one image")
    audio_tokens_per_s: float = Field(25.0, ge=0, description="Tokens for each second of sound")
    audio_tokens: int = Field(750, ge=0, description="Tokens of a recording of unknown length")
    video_tokens: int = Field(4096, ge=0, description="Tokens of a video")
    file_tokens: int = Field(2048, ge=0, description="Tokens of a file")


class PairingSection(Section):
    """How the router chooses the prefill and the decode engine of a request."""

    prefill: PolicyName = "least_loaded"
    decode: PolicyName = "least_loaded"
    session_header: str = Field(
        "x-session-id",
        pattern=r"^[A-Za-z0-9-]+$",
        description="HTTP header with the session's id, for session_affinity",
    )
    local_prefill_tokens: int = Field(
        64, ge=0, description="Decode computes prompts of up to this many tokens itself"
    )
    tokenize: Literal["engine"] | None = Field(
        None,
        description="engine: for cache_aware, ask an engine for the token ids of texts and chats, "
        "within 50 ms. Default: only of prompts that clients send as ids",
    )
    share_caches: Literal["never", "if_faster", "always"] = Field(
        "never",
        description="With cache_aware: an engine fetches what another engine's cache holds of a "
        "prompt, of whichever role. if_faster: where that takes less time than computing it, by "
        "the measured speeds of both",
    )
    media: MediaSection = Field(default_factory=MediaSection)
    prefill_wait_share: float | None = Field(
        None,
        ge=0,
        description="Also prefill on decode if the prompt's wait at prefill exceeds its wait at "
        "decode by a threshold. The threshold is this share of the prompt's compute time, for each "
        "request that the decode engine has. A request outside the slowest 10 % moves only above "
        "four times the threshold. Default: never",
    )
    first_token: Role = Field(
        "decode",
        description="The role whose first token begins a stream. Prefill's token comes earlier, by "
        "the time of the handoff",
    )
    first_token_hold_s: Seconds = Field(
        0.0,
        ge=0,
        description="Longest time, in seconds, that prefill's first token is held until decode "
        "answers. It shortens the pause after that token. A request whose first token is among the "
        "slowest 10 % is not held",
    )

    follow: Follow = Field(
        "auto",
        description="Send decode's leg while prefill computes a prompt of several steps, where its "
        "engines offer that (transfer.stream). auto: only if prefill and decode are on different "
        "hosts",
    )

    @property
    def hears_caches(self) -> bool:
        """Whether a policy chooses by what engines' caches hold."""
        return "cache_aware" in (self.prefill, self.decode)

    @property
    def shares_caches(self) -> bool:
        """Whether an engine may fetch from another engine's cache."""
        return self.share_caches != "never"

    @model_validator(mode="after")
    def _knows_what_it_shares(self) -> PairingSection:
        if self.shares_caches and not self.hears_caches:
            raise ValueError(
                "share_caches needs to know what engines' caches hold; set prefill and decode to "
                "cache_aware, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _holds_prefills(self) -> PairingSection:
        if self.first_token_hold_s and self.first_token != "prefill":
            raise ValueError(
                f"first_token_hold_s ({self.first_token_hold_s:g}) holds prefill's first token, "
                "but streams begin with decode's; set first_token: prefill, or remove it"
            )
        return self


OTHERS = "*"
"""The share of all clients that have none of their own."""


class ShareSection(Section):
    """What a client is entitled to. A client is known by the name of its key."""

    weight: float = Field(
        1.0, gt=0, description="Its share of the tokens while requests wait, beside other clients"
    )
    priority: int = Field(
        0,
        ge=-(1 << 31),
        lt=1 << 31,
        description="Lower numbers come first, whatever the shares. Engines that schedule by "
        "priority get it",
    )
    requests_per_minute: int | None = Field(None, gt=0, description="Most requests a minute")
    prompt_tokens_per_minute: int | None = Field(
        None, gt=0, description="Most tokens of prompts a minute, as the router estimates them"
    )
    output_tokens_per_minute: int | None = Field(
        None, gt=0, description="Most tokens of answers a minute"
    )
