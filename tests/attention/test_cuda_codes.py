"""K and V as codes of 8, 6 and 4 bits on a device: the same numbers as on CPUs, in rows of any width, by every verb."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.attention import cuda as attention_cuda
from hpcdecode.attention.base import KvCapacityError
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.quantized import CODES, restored
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.sizes import bytes_per_token
from tests.support.attention_cases import expected, ints, make_batch, run_batch, shape

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() and attention_cuda.built() else [])]
NARROW = ["k8v4", "int4"]
SHAPE = LayerShape(2, 48, 80, 6, 0.15, window=90, softcap=20.0, sinks=True)
# A row of V ends with 64, 32 or fewer dims in parts of its own; K and V differ in width either way.
WIDTHS = [
    (1, 16),
    (7, 17),
    (16, 33),
    (33, 64),
    (64, 80),
    (96, 96),
    (112, 112),
    (192, 128),
    (256, 1),
    (8, 160),
    (8, 256),
]


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def random_rows(tokens: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kv_dtype", NARROW)
@pytest.mark.parametrize(("k_dim", "v_dim"), WIDTHS)
def test_rows_of_any_width(k_dim, v_dim, kv_dtype, device):
    """A single new token sees V as stored; one wrong code of K moves the weights of others by more than the bound."""
    batch = make_batch(shape(1, k_dim, 2, v_dim=v_dim), (1, 3, 70), (1, 2, 1))
    out = run_batch(batch, kv_dtype, backend="attn_cuda", device=device)
    bound = 1e-5 * max(r[:, batch.shape.q_columns :].abs().max().item() for r in batch.rows)
    assert (out.double() - expected(batch, kv_dtype)).abs().max() <= bound
    v = restored(batch.rows[0][0, -v_dim:], CODES[kv_dtype][1])
    assert (out[0] - v.repeat(2)).abs().max() <= 1e-6 * v.abs().max()


@pytest.mark.parametrize("kv_dtype", NARROW)
def test_rows_that_are_constant_or_zero(kv_dtype, device):
    """A row without a range has no scale to divide by. V that is constant is one large number when it is rotated.

    The 16 bits that weights keep are of that number.
    """
    s = shape(1, 64, 4)
    batch = make_batch(s, (5, 130, 1), (1, 2, 1))
    for rows in batch.rows:
        rows[::3, s.q_columns :] = 0
        rows[1::3, -s.v_dim :] = 3.0
    out, answer = run_batch(batch, kv_dtype, backend="attn_cuda", device=device), expected(batch, kv_dtype)
    assert (out.double() - answer).abs().max() <= 3e-4
    assert not out[-1].any()


class Pair:
    """A KV cache on a device and one on CPUs, told the same."""

    def __init__(self, kv_dtype: str, device: str, block_tokens: int) -> None:
        size = {"kv_dtype": kv_dtype, "capacity_tokens": 640, "max_sequences": 4, "block_tokens": block_tokens}
        self.device = device
        self.own = open_kv_cache([SHAPE, SHAPE], **size, backend="attn_cuda", device=device)
        self.others = [open_kv_cache([SHAPE, SHAPE], **size, backend=backend) for backend in ("attn_cpu", "reference")]
        self.sinks = random_rows(1, SHAPE.q_heads, 9)[0]

    def tell(self, verb: str, *args) -> None:
        for cache in (self.own, *self.others):
            getattr(cache, verb)(*args)
            cache.check()
        assert {cache.used_tokens for cache in self.others} == {self.own.used_tokens}

    def append(self, slots, counts, seed) -> None:
        self.tell("extend", ints(slots), ints(counts))
        for layer in range(2):
            kv = random_rows(sum(counts), SHAPE.kv_columns, seed + layer)
            self.own.append(layer, ints(slots), ints(counts), kv.to(self.device))
            for cache in self.others:
                cache.append(layer, ints(slots), ints(counts), kv)

    def attend(self, slots, counts, seed) -> None:
        self.tell("extend", ints(slots), ints(counts))
        for layer in range(2):
            qkv = random_rows(sum(counts), SHAPE.row_columns, seed + layer)
            out = torch.full((len(qkv), SHAPE.out_columns), float("nan"), device=self.device)
            self.own.attend(layer, ints(slots), ints(counts), qkv.to(self.device), out, self.sinks)
            for cache, bound in zip(self.others, (3e-2, 2e-5), strict=True):  # CPUs round queries to codes, too
                other = torch.full(out.shape, float("nan"))
                cache.attend(layer, ints(slots), ints(counts), qkv, other, self.sinks)
                assert (out.cpu() - other).abs().max() <= bound


@pytest.mark.parametrize("kv_dtype", NARROW)
@pytest.mark.parametrize("block_tokens", [16, 24])
def test_every_verb_gives_what_cpus_give(kv_dtype, block_tokens, device):
    """Prompts in chunks, forks in the middle of a block, tokens taken back, and slots that others have left."""
    pair = Pair(kv_dtype, device, block_tokens)
    pair.append([2, 0], [70, 9], 1)
    pair.attend([0, 2], [40, 1], 3)
    pair.tell("fork", 2, 1)
    pair.attend([1, 0, 2], [1, 1, 1], 5)  # the fork writes to a copy of the last block
    pair.tell("truncate", 1, 33)
    pair.attend([1, 2], [3, 1], 7)
    pair.tell("release", ints([2]))
    pair.append([3], [100], 9)  # into blocks that are full of others' codes
    pair.attend([3, 1, 0], [1, 2, 1], 11)
    pair.tell("release", ints([0, 1, 3]))
    assert pair.own.used_tokens == 0 and pair.own.bytes_read > 0


def test_bytes_of_blocks():
    """No more than on CPUs for heads of 64 dims and more; all rows are multiples of 16 bytes."""
    device = torch.device("cpu")
    for dim, sizes in ((128, (198, 168)), (64, (102, 88)), (256, (390, 328))):
        layers = [LayerShape(4, dim, dim, 8, 1.0), LayerShape(1, dim, dim, 8, 1.0)]
        for kv_dtype, size in zip(NARROW, sizes, strict=True):
            assert attention_cuda.block_bytes(layers, kv_dtype, 64, device) == 64 * 5 * size
            assert bytes_per_token(layers, kv_dtype) == 5 * size
            options = {"capacity_tokens": 100, "max_sequences": 1, "backend": "attn_cuda", "device": "cpu"}
            assert open_kv_cache(layers, kv_dtype=kv_dtype, **options).bytes == 128 * 5 * size


@pytest.mark.parametrize("kv_dtype", NARROW)
def test_bad_calls_change_nothing(kv_dtype):
    cache = open_kv_cache(
        [shape(1, 8, 1)], kv_dtype=kv_dtype, capacity_tokens=96, max_sequences=2, backend="attn_cuda", block_tokens=16
    )
    cache.extend([0], [20])
    cache.append(0, [0], [20], torch.ones(20, 16))
    cache.fork(0, 1)
    cache.extend([0], [2])
    for call, error, message in (
        (lambda: cache.append(0, [1], [5], torch.zeros(5, 16)), ValueError, "shared with a fork"),
        (lambda: cache.append(0, [0], [23], torch.zeros(23, 16)), ValueError, "count 23 does not fit its length 22"),
        (lambda: cache.append(0, [0], [1], torch.zeros(1, 15)), ValueError, r"kv: expected shape \[1, 16\]"),
        (lambda: cache.append(1, [0], [1], torch.zeros(1, 16)), ValueError, "layer 1 is out of range"),
        (lambda: cache.append(0, [0], [1], torch.zeros(1, 16).double()), TypeError, "expected float32 or bfloat16"),
        (lambda: cache.extend([0], [96]), KvCapacityError, "tokens needed"),
        (lambda: cache.attend(0, [0], [1], torch.zeros(1, 24), torch.zeros(1, 9)), ValueError, "out: expected shape"),
    ):
        with pytest.raises(error, match=message):
            call()
    cache.check()
    assert (cache.length(0), cache.length(1)) == (22, 20)
