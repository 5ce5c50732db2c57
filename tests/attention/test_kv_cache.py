"""The KV store keeps what was written, shares what was forked, and accounts for every block, in both backends."""

import platform
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hpcdecode.attention.base import BACKENDS, KvCapacityError
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import LayerShape
from tests.support.attention_cases import ints, pretend

SHAPE = LayerShape(2, 4, 3, 2, 0.7)
SLOTS = 6
LINUX = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2])
CAPACITY = 160


def open_small(backend="attn_cpu", block_tokens=16, **options):
    settings = {"kv_dtype": "float32", "capacity_tokens": CAPACITY, "max_sequences": SLOTS} | options
    return open_kv_cache([SHAPE], block_tokens=block_tokens, backend=backend, **settings)


class StoreMachine(RuleBasedStateMachine):
    """Random verbs against a model that keeps the rows of every sequence in a list."""

    backend = "attn_cpu"

    @initialize(block_tokens=st.sampled_from([1, 5, 16, 32]), nodes=st.sampled_from([(0,), (0, 1), (0, 1, 1)]))
    def open(self, block_tokens, nodes):
        self.store = open_small(self.backend, block_tokens, **pretend(*nodes))
        self.rows: dict[int, np.ndarray] = {}
        self.random = np.random.default_rng(0)

    def kv(self, n):
        return self.random.standard_normal((n, SHAPE.kv_columns), dtype=np.float32)

    @rule(wanted=st.dictionaries(st.integers(0, SLOTS - 1), st.integers(0, 40), min_size=1, max_size=4))
    def extend(self, wanted):
        slots, counts = ints(wanted), ints(wanted.values())
        before = self.store.free_blocks
        try:
            self.store.extend(slots, counts)
        except KvCapacityError:
            assert self.store.free_blocks == before
            return
        kv = self.kv(int(counts.sum()))
        self.store.append(0, slots, counts, kv)
        start = 0
        for slot, count in wanted.items():
            old = self.rows.get(slot, np.zeros((0, SHAPE.kv_columns), np.float32))
            self.rows[slot] = np.concatenate([old, kv[start : start + count]])
            start += count

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), dst=st.integers(0, SLOTS - 1))
    def fork(self, data, dst):
        src = data.draw(st.sampled_from(sorted(self.rows)))
        if dst in self.rows or dst == src:
            with pytest.raises(ValueError):
                self.store.fork(src, dst)
            return
        before = self.store.free_blocks
        self.store.fork(src, dst)
        assert self.store.free_blocks == before
        self.rows[dst] = self.rows[src].copy()

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def truncate(self, data):
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        length = data.draw(st.integers(0, len(self.rows[slot])))
        self.store.truncate(slot, length)
        self.rows[slot] = self.rows[slot][:length]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def release(self, data):
        slots = data.draw(st.lists(st.sampled_from(sorted(self.rows)), min_size=1, max_size=2, unique=True))
        self.store.release(ints(slots))
        for slot in slots:
            del self.rows[slot]

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def read_back(self, data):
        """Attend from a fork, one new token: the answer depends on every row that the slot should hold."""
        slot = data.draw(st.sampled_from(sorted(self.rows)))
        try:
            self.store.extend(ints([slot]), ints([1]))
        except KvCapacityError:
            return
        qkv = self.random.standard_normal((1, SHAPE.q_columns + SHAPE.kv_columns), dtype=np.float32)
        out = np.full((1, SHAPE.out_columns), np.nan, np.float32)
        self.store.attend(0, ints([slot]), ints([1]), qkv, out)
        rows = self.rows[slot] = np.concatenate([self.rows[slot], qkv[:, SHAPE.q_columns :]])
        k = rows[:, :8].reshape(-1, 2, 4)
        v = rows[:, 8:].reshape(-1, 2, 3)
        scores = np.einsum("hd,lhd->hl", qkv[0, :8].reshape(2, 4), k) * SHAPE.scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(out[0], np.einsum("hl,lhd->hd", weights, v).ravel(), atol=1e-5)

    @invariant()
    def accounts(self):
        if not hasattr(self, "store"):
            return
        self.store.check()
        assert self.store.used_tokens + self.store.free_blocks * self.store.block_tokens == self.store.capacity_tokens
        for slot, rows in self.rows.items():
            assert self.store.length(slot) == len(rows)


@pytest.mark.parametrize("backend", BACKENDS)
def test_random_verbs(backend):
    machine = type("Machine", (StoreMachine,), {"backend": backend})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("nodes", [(0,), (0, 1, 2)])
def test_ten_thousand_operations(nodes):
    """A long walk over one store with short and 10,000-token sequences, which is full now and then."""
    random = np.random.default_rng(5)
    options = {"kv_dtype": "bfloat16", "capacity_tokens": 100_000, "max_sequences": 64, "block_tokens": 16}
    store = open_kv_cache([SHAPE], **options, **pretend(*nodes))
    open_slots: set[int] = set()
    full = long_forks = 0
    for i in range(10_000):
        slot, dst, verb = int(random.integers(64)), int(random.integers(64)), random.random()
        if verb < 0.5:
            count = 10_000 if verb < 0.06 else int(random.integers(0, 60))
            before = store.free_blocks, slot in open_slots and store.length(slot)
            try:
                store.extend(ints([slot]), ints([count]))
                open_slots.add(slot)
            except KvCapacityError:
                full += 1
                assert before == (store.free_blocks, slot in open_slots and store.length(slot))
        elif slot not in open_slots:
            with pytest.raises(ValueError):
                store.release(ints([slot]))
        elif verb < 0.7 and dst not in open_slots:
            store.fork(slot, dst)
            open_slots.add(dst)
            long_forks += store.length(dst) >= 10_000
        elif verb < 0.85:
            store.truncate(slot, int(random.integers(0, store.length(slot) + 1)))
        else:
            store.release(ints([slot]))
            open_slots.discard(slot)
        if i % 100 == 0:
            store.check()
    assert full > 100 and long_forks > 20
    store.release(ints(sorted(open_slots)))
    store.check()
    assert store.used_tokens == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tail_that_cannot_be_copied_changes_nothing(backend):
    store = open_small(backend, 16, capacity_tokens=32)
    store.extend(ints([0]), ints([20]))
    store.fork(0, 1)
    with pytest.raises(KvCapacityError):
        store.extend(ints([0, 1]), ints([1, 1]))
    store.check()
    assert (store.length(0), store.length(1), store.free_blocks) == (20, 20, 0)
    store.release(ints([1]))
    store.extend(ints([0]), ints([1]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_fork_of_a_long_prompt_costs_one_block_each(backend):
    store = open_kv_cache(
        [SHAPE], kv_dtype="float32", capacity_tokens=12_000, max_sequences=64, block_tokens=16, backend=backend
    )
    store.extend(ints([0]), ints([10_001]))
    store.append(0, ints([0]), ints([10_001]), torch.randn(10_001, SHAPE.kv_columns))
    used = store.used_tokens
    for slot in range(1, 64):
        store.fork(0, slot)
    assert store.used_tokens == used
    store.extend(ints(range(64)), ints([1] * 64))
    assert store.used_tokens == used + 63 * 16  # the last holder keeps the shared tail
    rows = torch.randn(1, SHAPE.q_columns + SHAPE.kv_columns).expand(64, -1).contiguous()
    out = torch.zeros(64, SHAPE.out_columns)
    store.attend(0, ints(range(64)), ints([1] * 64), rows, out)
    assert torch.equal(out, out[:1].expand(64, -1)) and out.any()
    store.check()
    store.release(ints(range(64)))
    assert store.used_tokens == 0
    store.check()


@pytest.mark.parametrize("block_tokens", [1, 16, 24, 64])
def test_backends_agree(block_tokens):
    outs = []
    for backend in BACKENDS:
        g = torch.Generator().manual_seed(3)
        store = open_small(backend, block_tokens, capacity_tokens=512)
        store.extend(ints([2, 0]), ints([70, 9]))
        store.append(0, ints([2, 0]), ints([70, 9]), torch.randn(79, SHAPE.kv_columns, generator=g))
        store.fork(2, 5)
        store.truncate(5, 33)
        slots, counts = ints([5, 0, 2]), ints([3, 1, 1])
        store.extend(slots, counts)
        out = torch.full((5, SHAPE.out_columns), float("nan"))
        store.attend(0, slots, counts, torch.randn(5, SHAPE.q_columns + SHAPE.kv_columns, generator=g), out)
        store.check()
        outs.append((out, store.used_tokens))
    torch.testing.assert_close(outs[0][0], outs[1][0], atol=1e-5, rtol=0)
    assert outs[0][1] == outs[1][1]


def test_shared_positions_cannot_be_overwritten():
    store = open_small()
    store.extend(ints([0]), ints([20]))
    store.append(0, ints([0]), ints([20]), torch.zeros(20, SHAPE.kv_columns))
    store.fork(0, 1)
    with pytest.raises(ValueError, match="shared with a fork"):
        store.append(0, ints([1]), ints([2]), torch.ones(2, SHAPE.kv_columns))


def test_release_is_all_or_nothing():
    store = open_small()
    store.extend(ints([0, 1]), ints([5, 5]))
    with pytest.raises(ValueError, match="slot 3 is not open"):
        store.release(ints([0, 3]))
    assert store.length(0) == 5


def test_empty_calls():
    store = open_small()
    store.extend(ints([]), ints([]))
    store.extend(ints([4]), ints([0]))
    assert store.length(4) == 0 and store.used_tokens == 0
    columns = SHAPE.q_columns + SHAPE.kv_columns
    store.attend(0, ints([4]), ints([0]), torch.zeros(0, columns), torch.zeros(0, SHAPE.out_columns))
    store.release(ints([4]))
    store.check()


def test_large_capacity_is_not_touched():
    store = open_kv_cache([SHAPE], kv_dtype="float32", capacity_tokens=1 << 28, max_sequences=1, block_tokens=1024)
    assert store.bytes > 20 << 30
    store.extend(ints([0]), ints([100]))


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(LINUX < (5, 14), reason="the kernel cannot populate memory")
@pytest.mark.parametrize("threads", [1, 2])
def test_new_blocks_have_memory_before_they_are_written(threads):
    options = {"kv_dtype": "float32", "capacity_tokens": 1 << 16, "max_sequences": 2, "block_tokens": 64}
    store = open_kv_cache([LayerShape(4, 32, 32, 4, 1.0)] * 2, **options, threads=threads)
    assert store.bytes == 128 << 20
    for slot in range(2):
        before = resident()
        store.extend(ints([slot]), ints([1 << 14]))
        assert 30 << 20 < resident() - before < 48 << 20
