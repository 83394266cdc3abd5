"""The kernel by CUDA's own compiler, for GPUs that need not be there."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from transport import host_device

from disagg.transport.device.copy_plan import WORDS

_FOUND = importlib.util.find_spec("nvidia")
_ROOTS = [Path(at) for at in (_FOUND.submodule_search_locations or [])] if _FOUND else []
_PLACES = [root / at / "lib" for root in _ROOTS for at in ("cuda_nvrtc", "cu13")]
_LIBRARIES = [one for place in _PLACES for one in sorted(place.glob("libnvrtc.so.*"))]

pytestmark = pytest.mark.skipif(not _LIBRARIES, reason="no nvidia-cuda-nvrtc for this machine")


def compiled(source: bytes, *options: str) -> tuple[bytes, str]:
    """The binary, and what the compiler said."""
    nvrtc = ctypes.CDLL(str(_LIBRARIES[-1]))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()

    def check(status: int) -> None:
        assert status == 0, (status, options)

    def text(kind: str) -> bytes:
        check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        check(getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer))
        return buffer.raw

    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"move.cu", 0, None, None))
    try:
        given: Sequence[bytes] = [one.encode() for one in options]
        status = nvrtc.nvrtcCompileProgram(
            program, len(given), (ctypes.c_char_p * len(given))(*given)
        )
        said = text("ProgramLog").rstrip(b"\0").decode()
        assert status == 0, said
        return text("CUBIN"), said
    finally:
        check(nvrtc.nvrtcDestroyProgram(ctypes.byref(program)))


@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_for_each_width_of_word_and_without_spills(architecture: str) -> None:
    source = host_device.KERNEL.read_bytes()
    binary, said = compiled(source, f"--gpu-architecture={architecture}", "--ptxas-options=-v")
    for word in WORDS:
        assert f"move_rows_{word}\0".encode() in binary
    assert not re.findall("warning|error", said), said
    spills = re.findall(r"(\d+) bytes spill", said)
    assert spills == ["0"] * 2 * len(WORDS)
    # 512 threads of a block, and 64 Ki registers of a processor: half of it at most.
    used = [int(count) for count in re.findall(r"Used (\d+) registers", said)]
    assert len(used) == len(WORDS)
    assert max(used) <= 64
