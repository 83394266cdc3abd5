"""An NVIDIA GPU that is not there: vLLM's own CUDA platform over vLLM's build for CPU.

With it, vLLM builds its configuration for a GPU, builds a model on torch's meta device, and chooses
attention backends, block sizes, KV cache groups and layouts by its own code. Nothing is computed:
kernels are names without bodies. It replaces parts of vLLM and torch for the whole process, so it
is for processes of its own; `install` comes before any other import of vLLM.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


@dataclass(frozen=True)
class Gpu:
    """capability: CUDA's. flash_attention: the versions of FlashAttention that run on it."""

    name: str
    capability: tuple[int, int]
    flash_attention: tuple[int, ...]


GPUS = {
    "hopper": Gpu("NVIDIA H100 80GB HBM3", (9, 0), (2, 3, 4)),
    "blackwell": Gpu("NVIDIA B200", (10, 0), (2, 4)),
}
_MEMORY_BYTES = 80 << 30
_MULTIPROCESSORS = 132
_SHARED_MEMORY_BYTES = 232448
# Modules with kernels, which the build for CPU lacks.
_KERNELS = (
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable_libtorch",
    "vllm._flashmla_C",
    "vllm._qutlass_C",
    "vllm._deep_gemm_C",
    "vllm.vllm_flash_attn",
    "flashinfer",
    "torchvision",  # of models that see; only the GPU's installation has it
)


class NoKernelError(RuntimeError):
    """Something was computed on the GPU that is not there."""


def install(gpu: Gpu) -> TorchFunctionMode:
    """Become this GPU, in the whole process and for good.

    Returns the mode under which models are built: what they put on the GPU goes to the meta device.
    """
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_PLUGINS="", CUDA_VISIBLE_DEVICES="")
    _replace_kernel_modules(gpu)
    _replace_triton_driver(gpu)
    _use_cuda_platform(gpu)
    _replace_torch_cuda(gpu)
    _mend_vllm()
    _name_missing_kernels()
    return _OnMeta()


# ---- kernels -------------------------------------------------------------------------------------


class _Kernel:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NoKernelError(self._name)

    def __getattr__(self, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self._name}.{name}")


class _KernelType(type):
    def __getattr__(cls, name: str) -> _Kernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(name)


class _KernelModule(types.ModuleType):
    """Has any name: a type if it is capitalised, else a function."""

    def __init__(self, name: str, gpu: Gpu) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0.9.9"
        self.is_fa_version_supported = lambda version, *args: version in gpu.flash_attention
        self.fa_version_unsupported_reason = lambda *args: None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _KernelType(name, (), {}) if name[0].isupper() else _Kernel(name)


class _KernelFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == one or name.startswith(f"{one}.") for one in _KERNELS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _KernelModule(spec.name, self._gpu)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _replace_kernel_modules(gpu: Gpu) -> None:
    sys.meta_path.insert(0, _KernelFinder(gpu))


def _name_missing_kernels() -> None:
    """Torch's own way to kernels. Last: vLLM registers shapes for those that it finds there."""
    namespace: Any = torch._ops._OpNamespace
    found = namespace.__getattr__

    def lenient(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith("_"):
                raise
            return _Kernel(name)

    namespace.__getattr__ = lenient


def _replace_triton_driver(gpu: Gpu) -> None:
    compiler: Any = importlib.import_module("triton.backends.compiler")
    runtime: Any = importlib.import_module("triton.runtime.driver")

    major, minor = gpu.capability

    class Driver:
        def get_current_target(self) -> Any:
            return compiler.GPUTarget("cuda", major * 10 + minor, 32)

        def get_current_device(self) -> int:
            return 0

        def get_benchmarker(self) -> Callable[..., int]:
            return lambda *args, **kwargs: 0

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args: {
                "max_shared_mem": _SHARED_MEMORY_BYTES,
                "multiprocessor_count": _MULTIPROCESSORS,
            }

    runtime.driver.set_active(Driver())


# ---- the platform --------------------------------------------------------------------------------


def _use_cuda_platform(gpu: Gpu) -> None:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    capability = DeviceCapability(*gpu.capability)

    class Platform(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return capability

        @classmethod
        def has_device_capability(cls, wanted: Any, device_id: int = 0) -> bool:
            number = wanted if isinstance(wanted, int) else wanted[0] * 10 + wanted[1]
            return capability.to_int() >= number

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return gpu.name

        @classmethod
        def get_device_uuid(cls, device_id: int = 0) -> str:
            return "not there"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return _MEMORY_BYTES

        @classmethod
        def is_fully_connected(cls, ids: list[int]) -> bool:
            return True

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return _MULTIPROCESSORS

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def log_warnings(cls) -> None:
            pass

    platforms: Any = importlib.import_module("vllm.platforms")
    platforms._current_platform = platforms.current_platform = Platform()
    # The build for CPU names itself in its version.
    platforms.vllm_version_matches_substr = lambda text: False


def _mend_vllm() -> None:
    """What asks for kernels while a model is built, and what would start other processes."""
    names = (
        "vllm._custom_ops",
        "vllm.model_executor.models.registry",
        "vllm.v1.worker.workspace",
        "vllm.model_executor.layers.sparse_attn_indexer",
        "vllm.utils.deep_gemm",
        "vllm.utils.import_utils",
    )
    found: list[Any] = [importlib.import_module(name) for name in names]
    ops, registry, workspace, *with_gemm = found
    for name in dir(ops):
        if "support" in name:
            setattr(ops, name, lambda *args, **kwargs: False)
    for module in with_gemm:
        for name in dir(module):
            if name.startswith(("is_deep_gemm", "has_deep_gemm")):
                setattr(module, name, lambda *args, **kwargs: True)
    workspace.current_workspace_manager = lambda: _Workspace()
    registry._run_in_subprocess = lambda function: function()
    lazy = registry._LazyRegisteredModel
    lazy._load_modelinfo_from_cache = lambda *args, **kwargs: None
    lazy._save_modelinfo_to_cache = lambda *args, **kwargs: None


class _Workspace:
    def get_simultaneous(self, *shapes: Any) -> list[None]:
        return [None] * len(shapes)

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


# ---- torch ---------------------------------------------------------------------------------------


class _Anything:
    """A stream, an event: whatever it is asked, it does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def _replace_torch_cuda(gpu: Gpu) -> None:
    major, minor = gpu.capability
    properties = types.SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=_MEMORY_BYTES,
        multi_processor_count=_MULTIPROCESSORS,
        shared_memory_per_block_optin=_SHARED_MEMORY_BYTES,
    )
    cuda: Mapping[str, Any] = {
        "Stream": _Anything,
        "Event": _Anything,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda *args: _Anything(),
        "get_device_capability": lambda *args: gpu.capability,
        "get_device_properties": lambda *args: properties,
    }
    accelerator: Mapping[str, Any] = {
        "is_available": lambda: True,
        "current_device_index": lambda: 0,
        "current_accelerator": lambda *args, **kwargs: torch.device("meta"),
        "current_stream": lambda *args: _Anything(),
    }
    for module, names in ((torch.cuda, cuda), (torch.accelerator, accelerator)):
        for name, value in names.items():
            setattr(module, name, value)


class _OnMeta(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if "cuda" in str(named.get("device", "")) or isinstance(named.get("device"), int):
            named["device"] = "meta"
        args = tuple("meta" if _is_cuda(one) else one for one in args)
        try:
            return func(*args, **named)
        except RuntimeError as error:
            if "accelerator device" in str(error):
                return 0
            raise


def _is_cuda(value: Any) -> bool:
    return isinstance(value, str | torch.device) and str(value).startswith("cuda")
