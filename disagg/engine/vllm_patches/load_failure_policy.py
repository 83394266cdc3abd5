"""Sets `kv_load_failure_policy` for connectors of ours inside vLLM's `MultiConnector`.

Our connectors set it on their own config: a load that fails is computed, or with `strict` is an
error. Inside `MultiConnector` that config is a copy, and vLLM's scheduler reads the outer one,
whose default fails the request. So it is set where the outer config is made.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from disagg.engine.vllm_patches.patching import Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OURS = ("DisaggConnector", "DisaggOffloadConnector")
_MULTI = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def policy(connectors: Any) -> Literal["fail", "recompute"] | None:
    """What connectors inside `MultiConnector` need; None if none of them is ours."""
    if not isinstance(connectors, list):
        return None
    ours = [one for one in connectors if isinstance(one, dict) and one.get("kv_connector") in OURS]
    if not ours:
        return None
    extra = [one.get("kv_connector_extra_config") for one in ours]
    strict = any(isinstance(one, dict) and one.get("strict") is True for one in extra)
    return "fail" if strict else "recompute"


def apply() -> None:
    """Change how vLLM makes its config. It parses `--kv-transfer-config` before it loads plugins,
    and makes the whole config afterwards."""
    from vllm.config import VllmConfig

    VllmConfig.__post_init__ = with_policy(VllmConfig.__post_init__)  # type: ignore[method-assign]


def with_policy(post_init: Callable[[VllmConfig], None]) -> Callable[[VllmConfig], None]:
    """vLLM's last step of making the config, and then the policy."""
    if hasattr(post_init, "sets_policy"):
        return post_init  # plugins may be loaded twice

    @functools.wraps(post_init)
    def made(config: VllmConfig) -> None:
        post_init(config)
        transfer = config.kv_transfer_config
        if transfer is not None and transfer.kv_connector == "MultiConnector":
            found = policy(transfer.kv_connector_extra_config.get("connectors"))
            if found is not None:
                transfer.kv_load_failure_policy = found

    made.sets_policy = True  # type: ignore[attr-defined]
    return made


def _inside_another(config: VllmConfig) -> bool:
    return _MULTI in sys.modules


PATCH = Patch(
    "load_failure_policy",
    fault="inside MultiConnector, a load that fails ends its request with an error.",
    versions="",
    report="none that we know of",
    until="vLLM asks the connectors inside MultiConnector for their policy",
    apply=apply,
    needed=_inside_another,
)
