"""Identifies an engine's weights: digests of checkpoints and of LoRA adapters.

vLLM distinguishes adapters by name and path, and checkpoints not at all. Other weights may have the
same name on another host, or later, while a directory still holds blocks computed with the old
ones. Such blocks must never be mixed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

ADAPTER_BYTES = 16
_WHOLE = 32 << 20  # smaller files are read completely
_ENDS = 64 << 10
# Large files are sampled in the middle of so many tensors; training changes nearly every tensor.
_PLACES, _PIECE = 64, 4 << 10
_LONGEST_HEADER = 100 << 20
_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_MOST_ADAPTERS = 4096


def checkpoint(path: str, revision: str | None) -> str:
    """A digest that identifies a checkpoint wherever it is stored; large files are sampled.

    For a hub's repository, of the local copy; without one, its name (weights may be streamed).
    """
    place = _place(path, revision, _CONFIG)
    if place is None:
        return f"{path}@{revision or 'default'}"
    digest = hashlib.blake2b(digest_size=16)
    if place.is_file():
        _sample(digest, place)
        return digest.hexdigest()
    digest.update(_canonical(place / _CONFIG))
    if not _sample_all(digest, place):
        digest.update(place.name.encode())  # a hub's commit: its weights are elsewhere
    return digest.hexdigest()


class Adapters:
    """Digests of LoRA adapters, each computed when it is first needed."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, int, tuple[int, ...]], bytes] = OrderedDict()

    def of(self, adapter: LoRARequest | None) -> bytes:
        """`ADAPTER_BYTES` that identify the weights; empty without an adapter. For an adapter that
        cannot be read, random bytes that match no other engine's."""
        if adapter is None:
            return b""
        # vLLM reloads files that change under a running engine only with this option.
        changed = _changed(adapter.lora_path) if adapter.load_inplace else ()
        key = (adapter.lora_name, adapter.lora_path, adapter.lora_int_id, changed)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _adapter(adapter.lora_path)
            if len(self._known) > _MOST_ADAPTERS:
                self._known.popitem(last=False)
        return found


def _adapter(path: str) -> bytes:
    digest, why = hashlib.blake2b(digest_size=ADAPTER_BYTES), "no weights found"
    try:
        place = _place(path, None, _ADAPTER)
        if place is not None:
            digest.update(_canonical(place / _ADAPTER))
            if _sample_all(digest, place):
                return digest.digest()
    except OSError as error:
        why = str(error)
    logger.warning("adapter %s cannot be read (%s): no other engine can use its blocks", path, why)
    return secrets.token_bytes(ADAPTER_BYTES)


def _place(path: str, revision: str | None, config: str) -> Path | None:
    """Its path on this host; None if it is not here."""
    place = Path(path).expanduser()
    if place.exists():
        return place
    try:
        found = try_to_load_from_cache(path, config, revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _changed(path: str) -> tuple[int, ...]:
    try:
        place = _place(path, None, _ADAPTER)
        return tuple(file.stat().st_mtime_ns for file in _files(place)) if place else ()
    except OSError:
        return ()


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix in _SUFFIXES)


def _canonical(config: Path) -> bytes:
    try:
        text = config.read_text()
        return json.dumps(json.loads(text), sort_keys=True).encode()
    except (OSError, ValueError):
        return b""  # without a configuration, only the weights identify it


def _sample_all(digest: hashlib.blake2b, folder: Path) -> bool:
    files = _files(folder)
    for file in files:
        digest.update(file.name.encode())
        _sample(digest, file)
    return bool(files)


def _sample(digest: hashlib.blake2b, file: Path) -> None:
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as weights:
        if size <= _WHOLE:
            digest.update(weights.read())
            return
        tensors = list(_tensors(weights)) if file.suffix == ".safetensors" else []
        tensors = tensors[:: -(-len(tensors) // _PLACES) or 1]
        middles = tensors or [size * n // _PLACES for n in range(1, _PLACES)]
        for begin, length in [(0, _ENDS), *((at, _PIECE) for at in middles), (size - _ENDS, _ENDS)]:
            weights.seek(begin)
            digest.update(weights.read(length))


def _tensors(weights: BinaryIO) -> Iterator[int]:
    """The offset of each tensor's middle in a safetensors file; empty for other files."""
    length = int.from_bytes(weights.read(8), "little")
    if length > _LONGEST_HEADER:
        return
    try:
        header = json.loads(weights.read(length))
        header.pop("__metadata__", None)
        places = sorted(tensor["data_offsets"] for tensor in header.values())
    except (ValueError, TypeError, KeyError, AttributeError):
        return
    for begin, end in places:
        yield 8 + length + max(begin, (begin + end - _PIECE) // 2)
