"""The ways to serve that `disagg bench serve` compares, and the router's options for each.

`colocated`: plain vLLM engines; each request goes to the less loaded one. `apart`: as many engines,
half of them prefill and half decode, with DisaggConnector; decode computes short prompts.
`apart-all`: prefill computes every prompt. `apart-whole`: as `apart`, but a handoff begins when the
whole prompt is computed.

`…-affinity`: the engine that was last sent the longest prefix of a prompt (`prefix_affinity`).
`…-knows`: the engine that has least to compute by what its cache holds (`cache_aware`), as the
engines' KV events tell. `apart-shares`: as `apart-knows`, and engines fetch what other engines'
caches hold (`share_caches: always`). `…-vllm-router`, `colocated-ray-serve`: vllm-router, and Ray
Serve LLM's prefix router, in front of the same engines, as they are by default: both send a prompt
where they sent the longest prefix before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from disagg.config import PolicyName

COLOCATED, APART = "colocated", "apart"


@dataclass(frozen=True)
class Way:
    """One way. `local`: decode computes short prompts itself. `follow`: see
    `router.pairing.follow`. `shares`: engines fetch from each other's caches. `peer`: the router,
    where it is not ours."""

    is_apart: bool
    policy: PolicyName = "least_loaded"
    local: bool = True
    follow: bool = True
    shares: bool = False
    peer: Literal["vllm-router", "ray-serve"] | None = None

    @property
    def hears(self) -> bool:
        """Whether the router hears the engines' KV events."""
        return self.policy == "cache_aware"


WAYS = {
    COLOCATED: Way(is_apart=False),
    "colocated-affinity": Way(is_apart=False, policy="prefix_affinity"),
    "colocated-knows": Way(is_apart=False, policy="cache_aware"),
    "colocated-vllm-router": Way(is_apart=False, peer="vllm-router"),
    "colocated-ray-serve": Way(is_apart=False, peer="ray-serve"),
    APART: Way(is_apart=True),
    "apart-affinity": Way(is_apart=True, policy="prefix_affinity"),
    "apart-knows": Way(is_apart=True, policy="cache_aware"),
    "apart-shares": Way(is_apart=True, policy="cache_aware", shares=True),
    "apart-vllm-router": Way(is_apart=True, local=False, follow=False, peer="vllm-router"),
    "apart-all": Way(is_apart=True, local=False),
    "apart-whole": Way(is_apart=True, follow=False),
}
