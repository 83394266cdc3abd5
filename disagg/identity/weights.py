"""Which weights an engine computes with: digests of checkpoints and of LoRA adapters.

vLLM tells adapters apart by name and path, and checkpoints not at all. Other weights may lie under
the same name on another host, or tomorrow, while blocks that were computed with the old ones are
still in a directory: these must never meet.
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
_WHOLE = 32 << 20  # smaller files are read to the end
_ENDS = 64 << 10
# Of a large file: in the middle of so many tensors. Training leaves hardly any tensor as it was.
_PLACES, _PIECE = 64, 4 << 10
_LONGEST_HEADER = 100 << 20
_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")
_CONFIG, _ADAPTER = "config.json", "adapter_config.json"
_MOST_ADAPTERS = 4096


def checkpoint(path: str, revision: str | None) -> str:
    """A digest that tells two checkpoints apart wherever they lie; large ones are sampled.

    Of a hub's repository, the local copy; its name if there is none (weights may be streamed).
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
        digest.update(place.name.encode())  # the commit, if it is a hub's: weights lie elsewhere
    return digest.hexdigest()


class Adapters:
    """What the adapters of requests are, each read once: when it is first asked for."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, int, tuple[int, ...]], bytes] = OrderedDict()

    def of(self, adapter: LoRARequest | None) -> bytes:
        """`ADAPTER_BYTES` that say which weights these are, nothing without an adapter. Of one
        that cannot be read, what no other engine answers."""
        if adapter is None:
            return b""
        # Files that change under a running engine are not loaded again, but for this option.
        changed = _changed(adapter.lora_path) if adapter.load_inplace else ()
        key = (adapter.lora_name, adapter.lora_path, adapter.lora_int_id, changed)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = _adapter(adapter.lora_path)
            if len(self._known) > _MOST_ADAPTERS:
                self._known.popitem(last=False)
        return found


def _adapter(path: str) -> bytes:
    digest, why = hashlib.blake2b(digest_size=ADAPTER_BYTES), "there are no weights"
    try:
        place = _place(path, None, _ADAPTER)
        if place is not None:
            digest.update(_canonical(place / _ADAPTER))
            if _sample_all(digest, place):
                return digest.digest()
    except OSError as error:
        why = str(error)
    logger.warning("adapter %s cannot be read (%s): its blocks are of no use elsewhere", path, why)
    return secrets.token_bytes(ADAPTER_BYTES)


def _place(path: str, revision: str | None, config: str) -> Path | None:
    """Where it lies on this host."""
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
        return b""  # what has none is told apart by its weights


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
    """The middle of each tensor of a safetensors file; nothing if it is none."""
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
