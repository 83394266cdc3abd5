"""Mends CPU engines whose ranks share the experts of a mixture.

Data parallel ranks have their own tokens, and maybe their own experts. So each layer gathers the
tokens of all ranks, and adds up and hands back what the experts made of them. vLLM's CPU
communicator has neither operation, and the engine dies at its first step. Here both are made of
gloo's: a gather of equal parts, padded, and a sum of everything, of which each rank keeps its part.

Expert parallel ranks hold some of the experts. vLLM's CPU kernel takes the number of an expert for
its place among those of this rank: it reads what is not there, and answers wrong or dies. Here the
numbers are translated, and experts of other ranks get no weight.

Must never change an engine on GPUs, nor a communicator that has the operations itself.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from disagg.engine.vllm_patches.patching import Patch, on_cpu

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig


def lend() -> None:
    """Give vLLM's CPU communicator what it lacks."""
    from vllm.distributed.device_communicators.base_device_communicator import (
        DeviceCommunicatorBase,
    )
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for function in (all_gatherv, reduce_scatterv, reduce_scatterv_into_output):
        name = function.__name__
        inherited = getattr(DeviceCommunicatorBase, name, None)
        if getattr(CpuCommunicator, name, None) is inherited:
            setattr(CpuCommunicator, name, function)


def all_gatherv(
    communicator: Any,
    input_: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """The rows of all ranks, in the order of the ranks. `sizes`: rows of each; None: all equal.

    A list of tensors is gathered tensor by tensor. Only along the first dimension.
    """
    if isinstance(input_, list):
        return [_gathered(communicator, one, dim, sizes) for one in input_]
    return _gathered(communicator, input_, dim, sizes)


def reduce_scatterv(
    communicator: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """This rank's rows of the sum over all ranks. `sizes`: rows of each; None: all equal."""
    _first_dimension(input_, dim)
    rank, ranks = communicator.rank_in_group, communicator.world_size
    sizes = sizes or [input_.shape[0] // ranks] * ranks
    total: torch.Tensor = communicator.all_reduce(input_.clone())
    begin = sum(sizes[:rank])
    return total[begin : begin + sizes[rank]].contiguous()


def reduce_scatterv_into_output(
    communicator: Any,
    input_: torch.Tensor,
    output: torch.Tensor,
    dim: int = -1,
    sizes: list[int] | None = None,
) -> torch.Tensor:
    """As `reduce_scatterv`, into a given tensor."""
    output.copy_(reduce_scatterv(communicator, input_, dim, sizes))
    return output


def take_own_experts() -> None:
    """Let vLLM's CPU experts heed which experts their rank holds."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.apply = by_own_number(CPUUnquantizedExperts.apply)  # type: ignore[method-assign]


def by_own_number(apply: Callable[..., None]) -> Callable[..., None]:
    """vLLM's `apply`, whose expert numbers are places among this rank's experts."""
    if hasattr(apply, "is_by_own_number"):
        return apply
    signature = inspect.signature(apply)

    @functools.wraps(apply)
    def is_by_own_number(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        given = call.arguments
        if (places := given["expert_map"]) is not None:
            if given["apply_router_weight_on_input"]:
                raise NotImplementedError(
                    "enable_expert_parallel: this model weights what goes into its experts, and on "
                    "a CPU ranks can then not leave out experts of others; unset it"
                )
            numbers = places[given["topk_ids"].long()]
            own = numbers >= 0
            given["topk_ids"] = numbers.clamp(min=0).to(given["topk_ids"].dtype)
            given["topk_weights"] = given["topk_weights"] * own
        apply(*call.args, **call.kwargs)

    is_by_own_number.is_by_own_number = True  # type: ignore[attr-defined]
    return is_by_own_number


def _gathered(
    communicator: Any, one: torch.Tensor, dim: int, sizes: list[int] | None
) -> torch.Tensor:
    import torch

    _first_dimension(one, dim)
    ranks = communicator.world_size
    sizes = sizes or [one.shape[0]] * ranks
    most = max(sizes)
    padded = one.new_zeros((most, *one.shape[1:]))
    padded[: one.shape[0]] = one
    everything = one.new_empty((ranks * most, *one.shape[1:]))
    torch.distributed.all_gather_into_tensor(everything, padded, group=communicator.device_group)
    return torch.cat([everything[at * most :][:size] for at, size in enumerate(sizes)])


def _first_dimension(tensor: torch.Tensor, dim: int) -> None:
    if dim % tensor.dim() != 0:
        raise NotImplementedError(
            f"ranks gather and add up rows, not dimension {dim} of {tuple(tensor.shape)}"
        )


def _shares_tokens(config: VllmConfig) -> bool:
    return _mixes(config) and config.parallel_config.data_parallel_size > 1


def _shares_experts(config: VllmConfig) -> bool:
    return _mixes(config) and bool(config.parallel_config.enable_expert_parallel)


def _mixes(config: VllmConfig) -> bool:
    return config.device_config.device_type == "cpu" and bool(config.model_config.is_moe)


COLLECTIVES = Patch(
    "cpu_expert_collectives",
    fault="data parallel mixtures of experts end at their first step on a CPU.",
    versions=">=0.29,<0.33",
    report="none that we know of",
    until="vLLM's CPU communicator has all_gatherv and reduce_scatterv",
    apply=lend,
    when=on_cpu,
    needed=_shares_tokens,
    in_workers=True,
)
OWN_EXPERTS = Patch(
    "cpu_own_experts",
    fault="expert parallel ranks read experts that they do not hold, on a CPU.",
    versions="==0.32.*",
    report="none that we know of",
    until="vLLM's CPU kernel heeds expert_map",
    apply=take_own_experts,
    when=on_cpu,
    needed=_shares_experts,
    in_workers=True,
)
