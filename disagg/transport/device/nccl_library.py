"""NCCL communicators between two processes, in which every wait can be ended.

cupy's `NcclCommunicator` blocks until the peer has joined, and in its first send until the peer
receives; a stopped peer blocks the thread forever. NCCL's solution is non-blocking communicators
(`ncclConfig_t.blocking`). cupy cannot request them, nor limit the number of channels, whose buffers
NCCL allocates from the engine's memory. So a few functions are called directly, in the library that
cupy and torch have loaded. It follows NCCL's user guide, "Fault Tolerance" and "ncclConfig_t".
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
from functools import cache as once
from typing import Any

from disagg.errors import TransferError
from disagg.transport.device.base import Communicator, Device, DeviceStream, Wait

logger = logging.getLogger(__name__)

# Each has buffers of about 10 MB per direction. Four saturate a network card; NCCL_MAX_CTAS
# overrides it.
CHANNELS = 4
_IN_PROGRESS = 7
_UINT8 = 1
_ABORT_S = 10.0
_UNDEFINED = -(2**31)
# The version of the struct below; NCCL uses its defaults for fields of later versions.
_CONFIG_VERSION = 21800
_MAGIC = 0xCAFEBEEF


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_char * 128)]


class _Config(ctypes.Structure):
    """ncclConfig_t of NCCL 2.18."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


class NcclCommunicators:
    """Raises `TransferError` (reason "nccl") where there is no NCCL of at least 2.18."""

    def __init__(self, device: Device) -> None:
        self._device, self._nccl = device, library()
        number = ctypes.c_int()
        _check(self._nccl, self._nccl.ncclGetVersion(ctypes.byref(number)))
        if number.value < _CONFIG_VERSION:
            raise TransferError(f"NCCL {number.value} is older than 2.18", reason="nccl")
        self.version = str(number.value)

    def new_id(self) -> bytes:
        identity = _UniqueId()
        _check(self._nccl, self._nccl.ncclGetUniqueId(ctypes.byref(identity)))
        return bytes(identity)

    def join(self, identity: bytes, rank: int, wait: Wait, *, bounded: bool = True) -> Communicator:
        if len(identity) != ctypes.sizeof(_UniqueId):
            raise TransferError(f"an NCCL id of {len(identity)} bytes", reason="nccl")
        self._device.use()
        least, most = (1, CHANNELS) if bounded else (_UNDEFINED, _UNDEFINED)
        config = _Config(
            ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, 0, _UNDEFINED, least, most, None,
            _UNDEFINED,
        )  # fmt: skip
        handle = ctypes.c_void_p()
        named = _UniqueId.from_buffer_copy(identity)
        status = self._nccl.ncclCommInitRankConfig(
            ctypes.byref(handle), 2, named, rank, ctypes.byref(config)
        )
        if not handle.value:
            _check(self._nccl, status or -1)
        communicator = _NcclCommunicator(self._nccl, handle, 1 - rank)
        try:
            communicator.settle(status, wait)
        except BaseException:
            communicator.abort()
            raise
        return communicator


class _NcclCommunicator:
    def __init__(self, nccl: Any, handle: ctypes.c_void_p, peer: int) -> None:
        self._nccl, self._peer = nccl, peer
        self._handle: ctypes.c_void_p | None = handle
        # NCCL frees the handle's object, so no thread may be inside a call with it then.
        self._calling = threading.Lock()

    def send(self, address: int, size: int, stream: DeviceStream, wait: Wait) -> None:
        self.settle(self._call("ncclSend", address, size, stream), wait)

    def receive(self, address: int, size: int, stream: DeviceStream, wait: Wait) -> None:
        self.settle(self._call("ncclRecv", address, size, stream), wait)

    def check(self) -> None:
        status = self._state()
        if status != _IN_PROGRESS:
            _check(self._nccl, status)

    def settle(self, status: int, wait: Wait) -> None:
        """Wait until a call is no longer in progress: only then is its work on the stream."""
        if status == _IN_PROGRESS:
            wait.until(lambda: self._state() != _IN_PROGRESS)
            status = self._state()
        _check(self._nccl, status)

    def abort(self) -> None:
        with self._calling:
            handle, self._handle = self._handle, None
        if handle is None:
            return

        # By another thread: should NCCL not come back, at least this one does.
        def run() -> None:
            status = self._nccl.ncclCommAbort(handle)
            if status not in (0, _IN_PROGRESS):
                logger.warning("NCCL could not end a communicator: error %d", status)

        thread = threading.Thread(target=run, name="disagg-nccl-abort", daemon=True)
        thread.start()
        thread.join(_ABORT_S)
        if thread.is_alive():
            logger.error("NCCL has not ended a communicator within %.0f s", _ABORT_S)

    def _call(self, name: str, address: int, size: int, stream: DeviceStream) -> int:
        with self._calling:
            handle = self._open()
            call = getattr(self._nccl, name)
            status: int = call(address, size, _UINT8, self._peer, handle, stream.handle)
        return status

    def _state(self) -> int:
        status = ctypes.c_int()
        with self._calling:
            asked = self._nccl.ncclCommGetAsyncError(self._open(), ctypes.byref(status))
        return asked or status.value

    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise TransferError("the communicator was ended", reason="nccl")
        return self._handle


def _check(nccl: Any, status: int) -> None:
    if status != 0:
        raise TransferError(f"NCCL: {nccl.ncclGetErrorString(status).decode()}", reason="nccl")


@once
def library() -> Any:
    """NCCL as cupy has loaded it. Raises `TransferError` (reason "nccl") where there is none."""
    with contextlib.suppress(ImportError):
        import cupy.cuda.nccl  # noqa: F401 - finds the library among the installed packages
    try:
        nccl = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise TransferError(f"no NCCL: {error}", reason="nccl") from error
    pointer, number = ctypes.c_void_p, ctypes.c_int
    transfer = [pointer, ctypes.c_size_t, number, number, pointer, pointer]
    signatures: dict[str, list[Any]] = {
        "ncclGetVersion": [pointer],
        "ncclGetUniqueId": [pointer],
        "ncclCommInitRankConfig": [pointer, number, _UniqueId, number, pointer],
        "ncclCommGetAsyncError": [pointer, pointer],
        "ncclCommAbort": [pointer],
        "ncclSend": transfer,
        "ncclRecv": transfer,
    }
    for name, arguments in signatures.items():
        function = getattr(nccl, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    nccl.ncclGetErrorString.argtypes = [ctypes.c_int]
    nccl.ncclGetErrorString.restype = ctypes.c_char_p
    return nccl
