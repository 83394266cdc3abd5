"""vLLM engines without a model: vLLM's scheduler and cache manager, a connector, and our lifecycle.

In place of a model stands a rule. What the KV cache holds for a token is made of that token and
all before it, and the next token is made of all that the cache holds. So answers can be known
beforehand, and a single wrong byte makes another answer; before that, it is found by comparing.
"""

from __future__ import annotations

import itertools
import math
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.config import KVEventsConfig, KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.config.scheduler import SchedulerPolicy
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

from disagg.connector.model_runner import Lifecycle, LifecycleV2
from disagg.connector.uniform_cache import allocate_uniform
from disagg.vllm_compat.kv_cache import config_of_groups

BLOCK, LAYERS, HEADS, HEAD_DIM = 32, 2, 2, 8
STEP = 128
"""The most tokens of a step."""
WORDS = 2 * HEAD_DIM * 4 // 8
"""64-bit words of one head and token: K and V in float32."""
POISON = 0xA5
VOCABULARY = 4096
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}

Words = npt.NDArray[np.uint64]
_MOST_LAYERS = 3 * LAYERS
_SPREAD: Words = np.random.SFC64(1).random_raw(_MOST_LAYERS * HEADS * WORDS) | np.uint64(1)
_WRAP = (1 << 64) - 1
WEIGHTS = 0x9E3779B97F4A7C15
"""What stands for the model's weights. With others, the cache holds other things."""


@dataclass(frozen=True)
class Layers:
    """A KV cache group of LAYERS layers. `window`: tokens that they see, the one to be computed
    among them; `local`: tokens of the pieces within which they attend. 0: they see all. `state`:
    they keep what the last token would have there, and nothing of those before it. `block`: tokens
    of a block; all groups' blocks have as many bytes, so of larger ones `heads` are fewer."""

    window: int = 0
    local: int = 0
    state: bool = False
    block: int = BLOCK

    @property
    def heads(self) -> int:
        """KV heads of each layer."""
        return HEADS * BLOCK // self.block

    def first_seen(self, position: int) -> int:
        """The first token that the one at this position attends to."""
        if self.state:
            return position
        if self.window:
            return max(0, position - self.window + 1)
        return position // self.local * self.local if self.local else 0

    def spec(self) -> KVCacheSpec:
        shape: dict[str, Any] = {
            "block_size": self.block,
            "num_kv_heads": self.heads,
            "head_size": HEAD_DIM,
            "dtype": torch.float32,
        }
        if self.state:
            return MambaSpec(
                block_size=BLOCK,
                shapes=((HEADS, 2 * WORDS),),
                dtypes=(torch.float32,),
                page_size_padded=FullAttentionSpec(**shape).page_size_bytes,
                mamba_cache_mode="align",
            )
        if self.window:
            return SlidingWindowSpec(**shape, sliding_window=self.window)
        if self.local:
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.local)
        return FullAttentionSpec(**shape)


PLAIN = (Layers(),)


# ---- the rule ----------------------------------------------------------------------------------


def chained(hashes: list[int], tokens: Sequence[int], weights: int = WEIGHTS) -> list[int]:
    """One number per token, of it and all before it; `hashes` are those of the first tokens."""
    for token in tokens[len(hashes) :]:
        last = hashes[-1] if hashes else weights
        hashes.append(((last ^ (token + 1)) * 0xD1342543DE82EF95 + 1) & _WRAP)
    return hashes


def contents(hashes: Sequence[int], layer: int) -> Words:
    """What the cache of a layer holds for these tokens: [tokens, heads, words]."""
    of_layer = _SPREAD.reshape(_MOST_LAYERS, HEADS, WORDS)[layer]
    spread = np.array(hashes, dtype=np.uint64)[:, None, None] * of_layer
    return spread ^ (spread >> np.uint64(29))


def next_token(held: Sequence[Words]) -> int:
    """The token that follows. held: what each layer sees of its cache."""
    words = np.concatenate([of_layer.reshape(-1) for of_layer in held])
    places = np.arange(1, words.size + 1, dtype=np.uint64)
    return int(np.bitwise_xor.reduce(words * places) >> np.uint64(40)) % VOCABULARY


def answer(
    prompt: Sequence[int], count: int, groups: Sequence[Layers] = PLAIN, weights: int = WEIGHTS
) -> list[int]:
    """What every engine of these groups and weights must answer."""
    tokens, hashes = list(prompt), list[int]()
    for _ in range(count):
        chained(hashes, tokens, weights)
        held = [
            contents(hashes[group.first_seen(len(tokens) - 1) :], number * LAYERS + layer)[
                :, : group.heads
            ]
            for number, group in enumerate(groups)
            for layer in range(LAYERS)
        ]
        tokens.append(next_token(held))
    return tokens[len(prompt) :]


# ---- the engine --------------------------------------------------------------------------------


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """vLLM's parallel groups, of this process alone: its connectors ask for their rank."""
    environment = dict(os.environ)  # engine configs set some variables
    with set_current_vllm_config(VllmConfig()):
        method = f"file://{folder / 'rendezvous'}"
        init_distributed_environment(1, 0, method, 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    destroy_model_parallel()
    destroy_distributed_environment()
    os.environ.clear()
    os.environ.update(environment)


@dataclass
class Known:
    """What a model runner remembers of a request. blocks: by KV cache group."""

    tokens: list[int]
    blocks: list[list[int]]
    computed: int
    hashes: list[int] = field(default_factory=list)


class Engine:
    """One engine of one worker rank, stepped by hand."""

    def __init__(
        self,
        model: Path,
        transfer: dict[str, Any],
        *,
        blocks: int = 48,
        layout: KVCacheLayout = KVCacheLayout.LBHNC,
        max_seqs: int = 8,
        events: bool = False,
        groups: Sequence[Layers] = PLAIN,
        prefix_caching: bool = True,
        policy: SchedulerPolicy = "fcfs",
    ) -> None:
        self.groups, self.weights = groups, WEIGHTS
        self.config = _engine_config(model, transfer, max_seqs, prefix_caching, policy)
        if events:
            self.config.kv_events_config = KVEventsConfig(
                enable_kv_cache_events=True, publisher="null"
            )
        self.cache_config = _cache_config(self.config, blocks, layout, groups)
        self.scheduler = Scheduler(
            self.config,
            self.cache_config,
            StructuredOutputManager(self.config),
            math.lcm(*(group.block for group in groups)),
            hash_block_size=BLOCK,
            log_stats=True,
        )
        # Of whichever kind: tests look into its halves.
        self.connector: Any = self.scheduler.get_kv_connector()
        worker = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, self.cache_config
        )
        if layout.is_block_outermost and len(groups) == 1:
            self.caches = allocate_uniform(self.cache_config, layout, torch.device("cpu")).layers
        else:
            self.caches = allocate_kv_cache(self.cache_config, torch.device("cpu"), layout)
        for name, cache in self.caches.items():
            cache.view(torch.uint8).fill_(POISON)
            layer = SimpleNamespace(kv_cache=cache)  # as attention layers are known to vLLM
            self.config.compilation_config.static_forward_context[name] = layer
        self.words: list[Words] = [
            cache.view(torch.int64).numpy().view(np.uint64) for cache in self.caches.values()
        ]
        runner = LifecycleV2 if self.config.use_v2_model_runner else Lifecycle
        self.lifecycle: Any = runner(worker, self.config)
        address = self.lifecycle.register(self.caches)
        assert self.connector is not None
        if address is not None:
            self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): address})
        self.known: dict[str, Known] = {}
        self.answers: dict[str, list[int]] = {}
        self.params: dict[str, dict[str, Any]] = {}
        self.finished: dict[str, str] = {}
        self.scheduled: list[Any] = []
        self.seen: list[KVConnectorOutput] = []
        self.counts: Counter[str] = Counter()  # "family|label": what the connector counted
        algorithm = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(algorithm)
        self._hasher = get_request_block_hasher(BLOCK, algorithm)
        self._ids = itertools.count()

    # ---- requests --------------------------------------------------------------------------

    def add(
        self,
        prompt: Sequence[int],
        count: int,
        params: dict[str, Any] | None,
        *,
        priority: int = 0,
    ) -> str:
        """A new request for `count` tokens."""
        assert self.config.kv_transfer_config is not None
        name = f"{self.config.kv_transfer_config.kv_role}-{next(self._ids)}"
        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(max_tokens=count, ignore_eos=True, extra_args=extra)
        request = Request(
            name, list(prompt), sampling, None, priority=priority, block_hasher=self._hasher
        )
        self.answers[name] = []
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        """The client went away."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def block_ids(self, name: str) -> list[int]:
        """The blocks that a request holds now."""
        return list(self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    # ---- steps -----------------------------------------------------------------------------

    def step(self) -> bool:
        """One step, as the engine core makes it; False if there was nothing to do."""
        if not self.scheduler.has_requests():
            return False
        scheduled = self.scheduler.schedule()
        self.scheduled.append(scheduled)
        # The other half is in another process, as a rule.
        sent = pickle.dumps(scheduled.kv_connector_metadata)
        scheduled.kv_connector_metadata = pickle.loads(sent)
        self._update_known(scheduled)
        if scheduled.total_num_scheduled_tokens:
            sampled, moved = self._forward(scheduled)
            names = list(scheduled.num_scheduled_tokens)
            ran = ModelRunnerOutput(
                names,
                {name: index for index, name in enumerate(names)},
                sampled,
                kv_connector_output=pickle.loads(pickle.dumps(moved)),
            )
        else:
            moved = self.lifecycle.idle_step(
                scheduled, write_blocks=partial(self._write_blocks, scheduled)
            )
            ran = ModelRunnerOutput.with_kv_conn_output_only(pickle.loads(pickle.dumps(moved)))
        self.seen.append(moved)
        for outputs in self.scheduler.update_from_output(scheduled, ran).values():
            for output in outputs.outputs:
                self._take(output)
            if outputs.scheduler_stats and outputs.scheduler_stats.kv_connector_stats:
                self._count(outputs.scheduler_stats.kv_connector_stats)
        return True

    def _count(self, stats: dict[str, Any]) -> None:
        for family, counts in stats.items():
            if isinstance(counts, dict):
                found = {f"{family}|{label}": n for label, n in counts.items()}
                self.counts.update({name: n for name, n in found.items() if isinstance(n, int)})

    def _take(self, output: EngineCoreOutput) -> None:
        self.answers[output.request_id] += output.new_token_ids
        if output.kv_transfer_params:
            self.params[output.request_id] = output.kv_transfer_params
        if output.finish_reason is not None:
            self.finished[output.request_id] = str(output.finish_reason)

    def _update_known(self, scheduled: SchedulerOutput) -> None:
        for name in scheduled.finished_req_ids:
            self.known.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self.known[new.req_id] = Known(
                # The second runner's requests are new again after a preemption.
                list(new.prefill_token_ids or new.prompt_token_ids or ()),
                [list(table) for table in new.block_ids],
                new.num_computed_tokens,
            )
        cached = scheduled.scheduled_cached_reqs
        for name, new_blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            known = self.known[name]
            known.computed = computed
            if name in cached.resumed_req_ids:
                known.blocks = [[] for _ in self.groups]
            for table, more in zip(known.blocks, new_blocks or (), strict=bool(new_blocks)):
                table += more

    def _write_blocks(self, scheduled: SchedulerOutput) -> None:
        """What vLLM's runners do to blocks before the forward pass."""
        zeroed, copies = scheduled.new_block_ids_to_zero, scheduled.kv_cache_block_copies
        for cache in self.caches.values() if zeroed or copies else ():
            bytes_ = cache.view(torch.uint8)
            bytes_[zeroed or []] = 0
            for copy in copies or ():
                bytes_[copy.dst_block_id] = bytes_[copy.src_block_id]
        if any(group.state for group in self.groups):
            for name, count in scheduled.num_scheduled_tokens.items():
                self._copy_states(self.known[name], count)

    def _copy_states(self, known: Known, count: int) -> None:
        """Where a step ends in another block than it begins in, the state moves there first."""
        begin, end = (known.computed - 1) // BLOCK, (known.computed + count - 1) // BLOCK
        for layer, cache in enumerate(self.caches.values()):
            if self.groups[layer // LAYERS].state and 0 <= begin < end:
                table = known.blocks[layer // LAYERS]
                cache.view(torch.uint8)[table[end]] = cache.view(torch.uint8)[table[begin]]

    def _forward(self, scheduled: SchedulerOutput) -> tuple[list[list[int]], KVConnectorOutput]:
        attn_metadata = dict.fromkeys(self.caches, "attention metadata")
        write_blocks = partial(self._write_blocks, scheduled)
        with self.lifecycle.step(
            scheduled, attn_metadata=attn_metadata, write_blocks=write_blocks
        ) as step:
            for index, (name, cache) in enumerate(self.caches.items()):
                with self.lifecycle.layer(name, cache, attn_metadata):
                    state = self.groups[index // LAYERS].state
                    compute = self._advance if state else self._attend
                    for request, count in scheduled.num_scheduled_tokens.items():
                        compute(index, self.known[request], count)
            sampled = [
                self._sample(self.known[request], count)
                for request, count in scheduled.num_scheduled_tokens.items()
            ]
        return sampled, step.output

    def _attend(self, layer: int, known: Known, count: int) -> None:
        """Write this layer's part of `count` tokens, and compare that of those before them."""
        start, stop = known.computed, known.computed + count
        group = self.groups[layer // LAYERS]
        first = group.first_seen(start)
        hashes = chained(known.hashes, known.tokens, self.weights)
        expected = contents(hashes[first:stop], layer)[:, : group.heads]
        blocks, offsets = _slots(known.blocks[layer // LAYERS], start, stop, group.block)
        assert blocks.all(), "a token has no block"
        self.words[layer][blocks, :, offsets] = expected[start - first :]
        assert np.array_equal(self._seen(layer, known, first, stop), expected), "wrong KV"

    def _advance(self, layer: int, known: Known, count: int) -> None:
        """The same of a layer with state: from that behind the tokens before these to theirs."""
        start, stop = known.computed, known.computed + count
        hashes = chained(known.hashes, known.tokens, self.weights)
        if start:
            seen = self._seen(layer, known, start - 1, start)
            assert np.array_equal(seen, contents(hashes[start - 1 : start], layer)), "wrong state"
        block = known.blocks[layer // LAYERS][(stop - 1) // BLOCK]
        assert block, "a state has no block"
        self._state(layer, block)[:] = contents(hashes[stop - 1 : stop], layer)

    def _state(self, layer: int, block: int) -> Words:
        return self.words[layer][block].reshape(-1)[: HEADS * WORDS].reshape(1, HEADS, WORDS)

    def _seen(self, layer: int, known: Known, first: int, stop: int) -> Words:
        group = self.groups[layer // LAYERS]
        if group.state:
            return self._state(layer, known.blocks[layer // LAYERS][first // BLOCK])
        blocks, offsets = _slots(known.blocks[layer // LAYERS], first, stop, group.block)
        return self.words[layer][blocks, :, offsets]

    def _sample(self, known: Known, count: int) -> list[int]:
        stop = known.computed + count
        if stop < len(known.tokens):
            return []
        held = [
            self._seen(layer, known, self.groups[layer // LAYERS].first_seen(stop - 1), stop)
            for layer in range(len(self.words))
        ]
        known.tokens.append(next_token(held))
        return known.tokens[-1:]

    # ---- at rest ---------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether nothing is pending and every block is free."""
        pool = self.scheduler.kv_cache_manager.block_pool
        return (
            not self.scheduler.has_requests()
            and not self.scheduler.requests
            and pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # the null block
        )

    def bytes_of(self, block_ids: Sequence[int]) -> list[torch.Tensor]:
        """A copy of these blocks, by layer: [blocks, H, N, bytes]."""
        return [cache.view(torch.uint8)[list(block_ids)] for cache in self.caches.values()]

    def untouched(self, but: Sequence[int]) -> bool:
        """Whether all blocks but these are as they were at the start."""
        rest = sorted(set(range(self.cache_config.num_blocks)) - set(but))
        return all(bool((part == POISON).all()) for part in self.bytes_of(rest))

    def close(self) -> None:
        """End both halves."""
        self.lifecycle.shutdown()
        self.scheduler.shutdown()


def run(engines: Sequence[Engine], until: Callable[[], bool], seconds: float = 20.0) -> None:
    """Step these engines in turn until something holds."""
    deadline = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < deadline, "it did not come to be in time"
        stepped = [engine.step() for engine in engines]
        if not any(stepped):
            time.sleep(0.001)


def _slots(
    table: Sequence[int], start: int, stop: int, block: int
) -> tuple[npt.NDArray[np.int64], ...]:
    """Block and offset of each position."""
    positions = np.arange(start, stop)
    return np.array(table, dtype=np.int64)[positions // block], positions % block


def _engine_config(
    model: Path,
    transfer: dict[str, Any],
    max_seqs: int,
    prefix_caching: bool,
    policy: SchedulerPolicy = "fcfs",
) -> VllmConfig:
    return EngineArgs(
        model=str(model),
        dtype="float32",
        block_size=BLOCK,
        max_model_len=512,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=STEP,
        enforce_eager=True,
        async_scheduling=False,
        scheduling_policy=policy,
        enable_prefix_caching=prefix_caching,
        kv_transfer_config=KVTransferConfig(**transfer),
    ).create_engine_config()


def _cache_config(
    config: VllmConfig, blocks: int, layout: KVCacheLayout, groups: Sequence[Layers]
) -> KVCacheConfig:
    record_kv_cache_layout(config.cache_config, layout.name)
    config.cache_config.mamba_cache_mode = "align"
    specs = [
        KVCacheGroupSpec(
            [f"model.layers.{number * LAYERS + i}.attn" for i in range(LAYERS)], group.spec()
        )
        for number, group in enumerate(groups)
    ]
    memory = blocks * LAYERS * specs[0].kv_cache_spec.page_size_bytes
    cache = config_of_groups(config, specs, memory)
    cache.kv_cache_layout, cache.hash_block_size = layout.name, BLOCK
    config.cache_config.num_gpu_blocks = cache.num_blocks
    return cache
