"""Which prompt a block belongs to: digests that both engines compute independently.

Full blocks use vLLM's chained block hashes. These cover multimodal input, cache salt, and name and
path of a LoRA adapter; the adapter's weights are added here. vLLM has no hash for the tokens after
the last full block, so they get one of ours, over the same inputs. So a block can never serve
another prompt than its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from disagg.identity.weights import Adapters
from disagg.transport.control.ticket import DIGEST

if TYPE_CHECKING:
    from vllm.v1.request import Request


class PromptDigests:
    """Digests of the prompts of one engine. hash_block_size: tokens per block hash of vLLM's."""

    def __init__(self, hash_block_size: int, algorithm: str) -> None:
        self._hash_block_size = hash_block_size
        self._algorithm, self._adapters = algorithm, Adapters()

    def of(self, request: Request, block_size: int, num_tokens: int) -> bytes:
        """`digests` of the prompt's first `num_tokens`, in blocks of the producer's size."""
        hashes: Sequence[bytes] = request.block_hashes
        if block_size != self._hash_block_size:
            hashes = self._hash_again(request, block_size)
        adapter = self._adapters.of(request.lora_request)
        return digests(request, hashes, block_size, num_tokens, adapter)

    def _hash_again(self, request: Request, block_size: int) -> Sequence[bytes]:
        """vLLM's block hashes at a block size other than the engine's."""
        fresh = copy.copy(request)
        fresh.block_hashes = []
        return get_request_block_hasher(block_size, get_hash_fn_by_name(self._algorithm))(fresh)


def digests(
    request: Request,
    hashes: Sequence[bytes],
    block_size: int,
    num_tokens: int,
    adapter: bytes = b"",
) -> bytes:
    """Digests of the prompt's first `num_tokens`: `DIGEST` bytes per full block, then `DIGEST`
    bytes for the tokens after the last full block.

    hashes: vLLM's chained block hashes of the request at this block size. adapter: the digest of
    its LoRA adapter's weights, see `identity/weights.py`.
    """
    full = num_tokens // block_size
    if adapter:
        hashes = [_mixed(hash_, adapter) for hash_ in hashes[:full]]
    blocks = b"".join(hash_[:DIGEST] for hash_ in hashes[:full])
    return blocks + _tail(request, hashes, full, slice(full * block_size, num_tokens), adapter)


def shared_tokens(ours: bytes, theirs: bytes, num_tokens: int, block_size: int) -> int:
    """How many leading tokens two prompts share: a multiple of the block size, or `num_tokens` if
    the tails are equal too.

    num_tokens: the length of the prompt that `theirs` was computed from.
    """
    if ours == theirs:
        return num_tokens
    same = 0
    for at in range(0, min(len(ours), len(theirs)) - DIGEST, DIGEST):
        if ours[at : at + DIGEST] != theirs[at : at + DIGEST]:
            break
        same += 1
    return same * block_size


def hashable(request: Request) -> bool:
    """Whether the prompt consists of tokens; prompts of embeddings are not handed off."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def _mixed(hash_: bytes, adapter: bytes) -> bytes:
    return hashlib.blake2b(hash_, digest_size=DIGEST, key=adapter).digest()


def _tail(
    request: Request, hashes: Sequence[bytes], full: int, rest: slice, adapter: bytes
) -> bytes:
    tokens = list(request.prompt_token_ids or ())[rest]
    identity = (
        adapter,
        request.cache_salt,
        [feature.identifier for feature in request.mm_features],
        tokens,
    )
    chained = hashlib.blake2b(hashes[full - 1] if full else b"", digest_size=DIGEST)
    chained.update(msgspec.msgpack.encode(identity))
    return chained.digest()
