"""Eviction: ARC against the paper's own pseudocode, and with keys in use."""

from __future__ import annotations

import random
from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disagg.errors import ConfigError
from disagg.store import policies
from disagg.store.policies import Admission, Policy


def key(number: int) -> bytes:
    return bytes([number])


def use(policy: Policy, number: int, capacity: int) -> bytes | None:
    """A cache's step: a hit, or a miss that is stored at once. Returns what went."""
    if key(number) in policy:
        policy.touch(key(number))
        return None
    admission = policy.admit(key(number), len(policy) >= capacity)
    assert admission.admitted
    policy.release(key(number))
    return admission.evicted


def test_lru_evicts_what_was_used_longest_ago() -> None:
    policy = policies.make("lru", 3)
    for number in (1, 2, 3):
        use(policy, number, 3)
    use(policy, 1, 3)
    policy.refresh(key(2))
    assert use(policy, 4, 3) == key(3)
    assert use(policy, 5, 3) == key(1)


@pytest.mark.parametrize("name", policies.POLICIES)
def test_what_is_held_is_not_evicted(name: str) -> None:
    policy = policies.make(name, 2)
    for number in (1, 2):
        use(policy, number, 2)
    policy.hold(key(1))
    assert use(policy, 3, 2) == key(2)
    policy.hold(key(3))
    assert policy.admit(key(4), True) == Admission(False)
    assert key(4) not in policy
    policy.release(key(1))
    assert use(policy, 4, 2) == key(1)
    policy.check_integrity()


def test_arc_keeps_what_is_used_again_through_a_scan() -> None:
    """Eight prompts that come back among a hundred that do not: LRU loses all of them."""
    survivors = {}
    for name in policies.POLICIES:
        policy = policies.make(name, 16)
        for _ in range(2):
            for number in range(8):
                use(policy, number, 16)
        for number in range(100, 200):
            use(policy, number, 16)
        survivors[name] = sum(key(number) in policy for number in range(8))
    assert survivors == {"lru": 0, "arc": 8, "turns": 0}


@pytest.mark.parametrize("capacity", range(1, 9))
def test_turns_evicts_the_oldest_less_what_its_uses_are_worth(capacity: int) -> None:
    policy = policies.make("turns", capacity)
    order = random.Random(capacity)
    used, uses, gone = dict[bytes, int](), dict[bytes, int](), list[bytes]()
    for now in range(1, 3001):
        one = key(min(int(order.expovariate(2 / (3 * capacity))), 9 * capacity))
        if one in used:
            uses[one] += 1
            policy.touch(one)
        else:
            if len(used) == capacity:
                oldest = min(used, key=lambda k: (used[k] + min(uses[k], 4) * capacity, uses[k]))
                del used[oldest]
                gone.append(oldest)
                assert policy.admit(one, True).evicted == oldest
            else:
                policy.admit(one, False)
            uses[one] = uses[one] + 1 if one in gone else 0
            gone = [each for each in gone if each != one][-capacity:]
            policy.release(one)
        used[one] = now
        policy.check_integrity()


def test_turns_keeps_a_conversation_that_came_back_for_longer() -> None:
    policy = policies.make("turns", 16)
    for number in (*range(8), *range(4)):  # eight prompts, and the second turn of four
        use(policy, number, 16)
    for number in range(100, 120):
        use(policy, number, 16)
    assert [number for number in range(8) if key(number) in policy] == [0, 1, 2, 3]


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'fifo' is not known; there are lru, arc, turns"):
        policies.make("fifo", 4)


class Paper:
    """ARC(c) as figure 4 of the paper has it, in its words. Nothing is ever in use."""

    def __init__(self, c: int) -> None:
        self.c, self.p = c, 0.0
        self.t1: OrderedDict[int, None] = OrderedDict()
        self.t2: OrderedDict[int, None] = OrderedDict()
        self.b1: OrderedDict[int, None] = OrderedDict()
        self.b2: OrderedDict[int, None] = OrderedDict()

    def request(self, x: int) -> None:
        if x in self.t1 or x in self.t2:
            self.t1.pop(x, None)
            self.t2.pop(x, None)
        elif x in self.b1:
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            self.replace(x)
            del self.b1[x]
        elif x in self.b2:
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            self.replace(x)
            del self.b2[x]
        else:
            self.miss(x)
            self.t1[x] = None
            return
        self.t2[x] = None

    def miss(self, x: int) -> None:
        l1, l2 = len(self.t1) + len(self.b1), len(self.t2) + len(self.b2)
        if l1 == self.c:
            if len(self.t1) < self.c:
                self.b1.popitem(last=False)
                self.replace(x)
            else:
                self.t1.popitem(last=False)
        elif l1 + l2 >= self.c:
            if l1 + l2 == 2 * self.c:
                self.b2.popitem(last=False)
            self.replace(x)

    def replace(self, x: int) -> None:
        if self.t1 and ((x in self.b2 and len(self.t1) == self.p) or len(self.t1) > self.p):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None


@pytest.mark.parametrize("capacity", range(1, 9))
def test_arc_does_what_the_paper_says(capacity: int) -> None:
    policy, paper = policies.Arc(capacity), Paper(capacity)
    order = random.Random(capacity)
    reached = set()
    for step in range(3000):
        spread = 3 * capacity if step // 100 % 2 else capacity + 2
        number = min(int(order.expovariate(2 / spread)), 3 * capacity)
        reached.add((number in paper.b2, len(paper.t1) == paper.p))
        use(policy, number, capacity)
        paper.request(number)
        policy.check_integrity()
        resident = {n for n in range(3 * capacity + 1) if key(n) in policy}
        assert resident == {*paper.t1, *paper.t2}
    assert len(reached) == 4, "a case of the paper was never met"


class Held(RuleBasedStateMachine):
    """Any order of calls, against a model that only knows who is in and who is held."""

    @initialize(name=st.sampled_from(sorted(policies.POLICIES)), capacity=st.integers(1, 5))
    def begin(self, name: str, capacity: int) -> None:
        self.policy, self.capacity = policies.make(name, capacity), capacity
        self.held: set[bytes] = set()
        self.idle: set[bytes] = set()

    @rule(number=st.integers(0, 9))
    def admit(self, number: int) -> None:
        if key(number) in self.held | self.idle:
            return
        full = len(self.held | self.idle) == self.capacity
        admission = self.policy.admit(key(number), full)
        assert admission.admitted == (not full or bool(self.idle))
        assert (admission.evicted is not None) == (full and bool(self.idle))
        if admission.evicted is not None:
            self.idle.remove(admission.evicted)
        if admission.admitted:
            self.held.add(key(number))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.held)))
        self.policy.release(one)
        self.held.remove(one)
        self.idle.add(one)

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.idle)))
        self.policy.hold(one)
        self.idle.remove(one)
        self.held.add(one)

    @precondition(lambda self: self.held | self.idle)
    @rule(data=st.data(), what=st.sampled_from(["touch", "refresh", "remove"]))
    def other(self, data: st.DataObject, what: str) -> None:
        one = data.draw(st.sampled_from(sorted(self.held | self.idle)))
        getattr(self.policy, what)(one)
        if what == "remove":
            self.held.discard(one)
            self.idle.discard(one)

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "policy"):
            self.policy.check_integrity()
            assert len(self.policy) == len(self.held | self.idle)
            assert all(one in self.policy for one in self.held | self.idle)


TestHeld = Held.TestCase
TestHeld.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
