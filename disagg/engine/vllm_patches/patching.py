"""How a patch of vLLM is described, applied and asked about.

vLLM loads our plugin in each of its processes, also for engines that have nothing to do with us.
So a patch that cannot be applied is one line in vLLM's log, never an exception. An engine with a
connector of ours that needs the patch is refused when the connector starts (`require`).

Must never import vLLM before a patch is applied: this module is imported everywhere.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from disagg.errors import ConfigError
from disagg.vllm_compat import versions

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# A logger of vLLM's: ours have handlers only where there is a connector of ours.
logger = logging.getLogger("vllm.disagg")


def _always() -> bool:
    return True


def _by_nobody(config: VllmConfig) -> bool:
    return False


def on_cpu() -> bool:
    """Whether this process's engine, if any, computes on a CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


@dataclass(frozen=True)
class Patch:
    """One change of vLLM.

    `fault`: what goes wrong without it. `versions`: of vLLM that it is for, a PEP 440 specifier;
    outside of them it is off. `report`: the upstream issue. `until`: when it can go. `when`:
    whether this process may need it. `needed`: whether an engine with this config must not run
    without it. `in_workers`: it is applied when a worker starts, as importing what it changes
    costs other processes a second.
    """

    name: str
    fault: str
    versions: str
    report: str
    until: str
    apply: Callable[[], None]
    when: Callable[[], bool] = _always
    needed: Callable[[VllmConfig], bool] = _by_nobody
    in_workers: bool = False

    def is_for(self, vllm: str) -> bool:
        """Whether this version of vLLM is one that the patch is for."""
        return versions.matches(self.versions, vllm)


# Patches that could not be applied in this process, and why.
_failed: dict[str, tuple[Patch, str]] = {}


def install(patches: Iterable[Patch], vllm: str | None = None) -> None:
    """Apply the patches that are for this vLLM and this process. Never raises."""
    vllm = vllm or versions.installed()
    for patch in patches:
        if patch.is_for(vllm):
            _try(patch, vllm, functools.partial(_install, patch, vllm))


def require(config: VllmConfig) -> None:
    """Raise `ConfigError` if an engine with this config needs a patch that could not be applied."""
    problems = [
        f"vLLM {versions.installed()}: this engine needs the patch {patch.name}, which could not "
        f"be applied ({why}). Without it: {patch.fault} Install a vLLM "
        f"{patch.versions or 'release'} without changes of its own, or report this with both "
        "versions"
        for patch, why in _failed.values()
        if patch.needed(config)
    ]
    if problems:
        raise ConfigError(problems)


def _install(patch: Patch, vllm: str) -> None:
    if not patch.when():
        return
    if not patch.in_workers:
        patch.apply()
        return
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    apply = functools.partial(_try, patch, vllm, patch.apply)
    WorkerWrapperBase.init_device = before(  # type: ignore[method-assign]
        WorkerWrapperBase.init_device, patch.name, apply
    )


def _try(patch: Patch, vllm: str, apply: Callable[[], None]) -> None:
    try:
        apply()
    except Exception as error:  # noqa: BLE001 - else it would end engines that do not need it
        why = f"{type(error).__name__}: {error}"
        _failed[patch.name] = patch, why
        logger.warning(
            "disagg: the patch %s cannot be applied to vLLM %s (%s). Without it: %s",
            patch.name,
            vllm,
            why,
            patch.fault,
        )


def before(
    init: Callable[[Any], None], name: str, apply: Callable[[], None]
) -> Callable[[Any], None]:
    """vLLM's start of a worker, after `apply`."""
    names: tuple[str, ...] = getattr(init, "patches_before", ())
    if name in names:
        return init  # plugins may be loaded twice

    @functools.wraps(init)
    def init_device(worker: Any) -> None:
        apply()
        init(worker)

    init_device.patches_before = (*names, name)  # type: ignore[attr-defined]
    return init_device
