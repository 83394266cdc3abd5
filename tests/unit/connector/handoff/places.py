"""Places of a random deployment: in each, engines live one after the other, with clocks of its own.

A place checks what its engines do: loaded blocks hold what the rule says, and no load that began
after its lease had ended is believed.
"""

from __future__ import annotations

import contextlib
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from unit.connector.modelless import LAYERS, WEIGHTS, Engine, Layers, chained, contents
from vllm.v1.kv_cache_layout import KVCacheLayout

from disagg.connector.handoff.messages import HandoffLoad, LoadReport, StepReport, StepWork
from disagg.transport.control.ticket import Handoff

# Several times a load's deadline, also on a busy machine.
SETTLE_S = 60.0


class WrongError(AssertionError):
    """A rule of handoffs is broken: wrong bytes, a leak, or something that does not end."""


class Clock:
    """Monotonic seconds that can be set forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


@dataclass(frozen=True)
class EnginePlan:
    """What an episode's seed drew for one place. extra: keys of `kv_connector_extra_config`."""

    role: str
    blocks: int
    layout: str
    prefix_caching: bool
    max_seqs: int
    groups: tuple[Layers, ...]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def produces(self) -> bool:
        return self.role in ("kv_producer", "kv_both")

    @property
    def consumes(self) -> bool:
        return self.role in ("kv_consumer", "kv_both")

    @property
    def strict(self) -> bool:
        return bool(self.extra.get("strict"))


Life = tuple[int, int]
"""A place's number, and the how-manieth of its engines it is."""


@dataclass
class Ledger:
    """Leases that can no longer be acquired; lives that have ended, with all of theirs."""

    over: set[tuple[Life, int]] = field(default_factory=set)
    dead: set[Life] = field(default_factory=set)

    def is_over(self, life: Life, lease: int) -> bool:
        return life in self.dead or (life, lease) in self.over


@dataclass(frozen=True)
class Asked:
    """A request at a decode engine. handoff: of its params, if they are whole. life: of the engine
    that made them."""

    prompt: list[int]
    count: int
    handoff: Handoff | None
    weights: int
    life: Life | None = None

    @property
    def is_followed(self) -> bool:
        """Whether its leg did not wait for prefill's."""
        return self.handoff is not None and self.handoff.lease < 0


@dataclass(frozen=True)
class Began:
    """A load that an engine's worker was told to do. too_late: its lease had ended before."""

    load: HandoffLoad
    too_late: bool


class Place:
    """One engine after the other. number: in the deployment; names it in traces."""

    def __init__(self, number: int, plan: EnginePlan, model: Path, ledger: Ledger) -> None:
        self.number, self.plan, self._model, self._ledger = number, plan, model, ledger
        self.clock, self.patience = Clock(), Clock()
        self.weights, self.lives = WEIGHTS, 0
        self.prefilling: dict[str, list[int]] = {}
        self.decoding: dict[str, Asked] = {}
        self.fetching: dict[str, Asked] = {}  # prefills that have a ticket of a neighbour
        self.outcome: dict[str, str] = {}  # of requests whose load has ended
        self.begun: dict[str, Began] = {}
        self.halted = 0  # turns for which it takes no step
        self.hangs, self._hung = False, contextlib.ExitStack()
        self._granted: dict[str, int] = {}
        self.engine = self._start(0)

    def __str__(self) -> str:
        return f"{self.plan.role.removeprefix('kv_')} {self.number}"

    # ---- lives -----------------------------------------------------------------------------

    def _start(self, port: int) -> Engine:
        transfer = {
            "kv_connector": "DisaggConnector",
            "kv_connector_module_path": "disagg.connector",
            "kv_role": self.plan.role,
            "kv_connector_extra_config": {**self.plan.extra, "port": port},
        }
        engine = Engine(
            self._model,
            transfer,
            blocks=self.plan.blocks,
            layout=KVCacheLayout[self.plan.layout],
            max_seqs=self.plan.max_seqs,
            groups=self.plan.groups,
            prefix_caching=self.plan.prefix_caching,
        )
        engine.weights = self.weights
        scheduler = engine.connector.scheduler
        scheduler.consumer._clock = self.clock
        if scheduler._stall is not None:
            scheduler._stall._clock = self.patience
        producer = engine.lifecycle.connector.worker.producer
        if producer is not None:
            producer._leases._clock = self.clock
        self.lives += 1
        return engine

    @property
    def producer(self) -> Any:
        """The worker's producer part; None at a pure consumer."""
        return self.engine.lifecycle.connector.worker.producer

    @property
    def consumer(self) -> Any:
        """The worker's consumer part."""
        return self.engine.lifecycle.connector.worker.consumer

    @property
    def life(self) -> Life:
        return self.number, self.lives

    def asked(self, name: str) -> Asked | None:
        """The request of this name that may load blocks; None if its client has left."""
        return self.decoding.get(name) or self.fetching.get(name)

    def leases(self) -> set[int]:
        """The numbers of those that the worker holds."""
        return set() if self.producer is None else set(self.producer._leases._leases)

    def restart(self, *, same_port: bool) -> None:
        """End this life and begin another; all requests of this one are lost."""
        self.go_on()
        port = self.producer.endpoint.port if same_port and self.producer is not None else 0
        self._ledger.dead.add(self.life)
        self.engine.close()
        mine = (
            self.prefilling,
            self.decoding,
            self.fetching,
            self.outcome,
            self.begun,
            self._granted,
        )
        for requests in mine:
            requests.clear()
        try:
            self.engine = self._start(port)
        except OSError:  # another process of this machine was faster
            self.engine = self._start(0)

    def new_weights(self, weights: int) -> None:
        """What is computed from now on is made of these."""
        self.weights = self.engine.weights = weights

    def hang(self) -> None:
        """The threads that serve leases stand still until `go_on`."""
        if self.producer is not None and not self.hangs:
            self._hung.enter_context(self.producer._leases._changed)
            self.hangs = True

    def go_on(self) -> None:
        """Undo `hang` and `halted`."""
        self._hung.close()
        self.hangs, self.halted = False, 0

    # ---- steps -----------------------------------------------------------------------------

    def step(self) -> bool:
        """One step of the engine, checked. False if it had nothing to do."""
        if not self.engine.step():
            return False
        work = self.engine.scheduled[-1].kv_connector_metadata
        assert isinstance(work, StepWork)
        self._note(work)
        self._check_reports(self.engine.seen[-1])
        # Long episodes would keep every step.
        self.engine.scheduled.clear()
        self.engine.seen.clear()
        return True

    def _note(self, work: StepWork) -> None:
        for load in work.loads:
            asked = self.asked(load.request_id)
            assert asked is not None
            life = asked.life
            too_late = life is not None and self._ledger.is_over(life, load.lease)
            self.begun[load.request_id] = Began(load, too_late)
        self._granted.update({grant.request_id: grant.lease for grant in work.grants})
        ended = [lease for lease in self._granted.values() if lease < work.revoked]
        self._ledger.over.update((self.life, lease) for lease in [*ended, *work.taken_back])

    def _check_reports(self, moved: Any) -> None:
        for request in moved.finished_sending or ():
            self._ledger.over.add((self.life, self._granted.pop(request)))
        for request in moved.finished_recving or ():
            began, asked = self.begun.pop(request), self.asked(request)
            invalid = moved.invalid_block_ids.intersection(began.load.block_ids)
            if invalid and asked is not None:
                right = sum(block not in invalid for block in began.load.block_ids)
                self._check_bytes(request, asked, began.load, right)
            if request in moved.failed_recving or invalid:
                continue
            if began.too_late:
                raise WrongError(
                    f"{self}: {request} believed lease {began.load.lease}, which ended"
                )
            if asked is None:
                raise WrongError(f"{self}: {request} was aborted, and its load counts as loaded")
            self._check_bytes(request, asked, began.load)
            self.outcome[request] = "loaded"
        report = moved.kv_connector_worker_meta
        if isinstance(report, StepReport):
            for ended in report.loads:
                if ended.outcome != "loaded" and self.asked(ended.request_id) is not None:
                    self.outcome[ended.request_id] = _failure(ended)

    def _check_bytes(
        self, request: str, asked: Asked, load: HandoffLoad, most: int | None = None
    ) -> None:
        """most: how many of its first blocks are said to be right; all if None."""
        assert asked.handoff is not None
        stop = min(asked.handoff.num_tokens, len(asked.prompt))
        hashes = chained([], asked.prompt[:stop], self.weights)
        theirs = [-(-asked.handoff.num_tokens // group.block) for group in self.plan.groups]
        firsts = [sum(theirs[:group]) for group in range(len(theirs))]
        blocks = iter(load.block_ids[:most])
        for begin, end in load.spans:
            group = bisect_right(firsts, begin) - 1
            for position in range(begin - firsts[group], end - firsts[group]):
                block = next(blocks, None)
                if block is None:
                    return
                self._check_block(request, group, position, block, hashes)

    def _check_block(
        self, request: str, group: int, position: int, block: int, hashes: Sequence[int]
    ) -> None:
        of_group = self.plan.groups[group]
        size, heads = of_group.block, of_group.heads
        tokens = slice(position * size, min((position + 1) * size, len(hashes)))
        for layer in range(group * LAYERS, (group + 1) * LAYERS):
            if of_group.state:
                found, due = self.engine._state(layer, block), contents(hashes[-1:], layer)
            else:
                found = self.engine.words[layer][block][:, : tokens.stop - tokens.start]
                due = contents(hashes[tokens], layer)[:, :heads].swapaxes(0, 1)
            if not np.array_equal(found, due):
                raise WrongError(
                    f"{self}: {request} was loaded, and layer {layer} of block {position} is wrong"
                )

    # ---- at rest ---------------------------------------------------------------------------

    def left(self) -> Iterator[str]:
        """What is left of handoffs here, each with its number."""
        scheduler, producer = self.engine.connector.scheduler, self.producer
        counts = {
            "requests of the scheduler": len(self.engine.scheduler.requests),
            "blocks in use": self._blocks_in_use(),
            "loads of the scheduler": len(scheduler.consumer._loads),
            "reports of the scheduler": len(scheduler.consumer._reports),
            "loads of the worker": len(self.consumer._cancelled),
            "connections with a lease": self._unsettled(),
        }
        if producer is not None:
            producer._leases.check_integrity()
            board = producer._leases.board
            counts |= {
                "leases of the scheduler": len(scheduler.producer._leases),
                "numbers of leases": len(scheduler.producer._numbers),
                "leases of the worker": producer._leases.held(),
                "leases on the board": len(board.posted()),
                "hazard slots that name a lease": int(np.count_nonzero(board.hazards._slots)),
            }
            for sender in producer._senders:
                for name in ("_fetches", "_live"):  # of tcp, and of shared storage
                    counts[f"staged for {sender.name}"] = len(getattr(sender, name, ()))
                    if counts[f"staged for {sender.name}"]:
                        break
        return (f"{self}: {count} {what}" for what, count in counts.items() if count)

    def _blocks_in_use(self) -> int:
        pool = self.engine.scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())  # one is the null block

    def _unsettled(self) -> int:
        idle = self.consumer._peers._idle.values()
        return sum(one.in_use or not one.settled for pooled in idle for one in pooled)


def _failure(report: LoadReport) -> str:
    return report.reason or report.outcome


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    """Whether it came to be in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
