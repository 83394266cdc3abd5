"""LMCache's LMCacheMPConnector in engines that are forks.

In a fork LMCache is imported before vLLM looks through all objects of all modules for kernels. It
asks llvmlite's library object, which takes any name for that of a C function, for `__dict__`, and
ends with `AttributeError: '_lib_fn_wrapper' object has no attribute 'get'`.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import ffi
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector as LMCacheMPConnector

_LIBRARY = type(ffi.lib)
_c_function = _LIBRARY.__getattr__


def _named(self: Any, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _c_function(self, name)


_LIBRARY.__getattr__ = _named
