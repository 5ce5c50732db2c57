"""Bad arguments of the attention verbs end in an error that says what was expected, and change nothing."""

import numpy as np
import pytest
import torch

from hpcdecode.attention.base import KvCapacityError, isa
from hpcdecode.attention.open import open_kv_cache
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.attention.sizes import bytes_per_token, capacity_for
from hpcdecode.errors import UserError
from tests.support.attention_cases import ints

SHAPE = LayerShape(2, 8, 4, 4, 0.5)
COLUMNS = SHAPE.q_columns + SHAPE.kv_columns


def store(**options):
    settings = {"kv_dtype": "float32", "capacity_tokens": 64, "max_sequences": 4, "block_tokens": 16} | options
    return open_kv_cache([SHAPE], **settings)


@pytest.fixture
def one():
    s = store()
    s.extend(ints([1]), ints([3]))
    return s


def attend(s, *, layer=0, slots=(1,), counts=(3,), qkv=None, out=None, sinks=None):
    qkv = torch.zeros(3, COLUMNS) if qkv is None else qkv
    out = torch.zeros(3, SHAPE.out_columns) if out is None else out
    s.attend(layer, ints(slots), ints(counts), qkv, out, sinks)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layer": 1}, "layer 1 is out of range"),
        ({"layer": -1}, "layer -1 is out of range"),
        ({"slots": (2,)}, "slot 2 is not open"),
        ({"slots": (4,)}, "slot 4 is out of range"),
        ({"slots": (1, 1), "counts": (1, 2)}, "given twice"),
        ({"counts": (4,)}, "count 4 does not fit its length 3"),
        ({"counts": (-1,)}, "count -1 does not fit"),
        ({"counts": (1, 2)}, "same length"),
        ({"qkv": torch.zeros(3, COLUMNS + 1)}, "qkv: expected shape"),
        ({"qkv": torch.zeros(3)}, "qkv: expected 2 dimensions, got 1"),
        ({"qkv": torch.zeros(COLUMNS, 3).T}, "qkv: expected a contiguous last dimension"),
        ({"out": torch.zeros(2, SHAPE.out_columns)}, "out: expected shape"),
        ({"out": torch.zeros(1, SHAPE.out_columns).expand(3, -1)}, "out: expected rows that do not overlap"),
        ({"out": torch.zeros(3, SHAPE.out_columns).bfloat16()}, "same dtype"),
        ({"sinks": torch.zeros(4)}, "without attention sinks"),
    ],
)
def test_bad_attend(one, change, message):
    with pytest.raises(ValueError, match=message):
        attend(one, **change)
    one.check()


@pytest.mark.parametrize(
    "qkv, message",
    [
        (torch.zeros(3, COLUMNS, dtype=torch.float64), "expected float32 or bfloat16, got float64"),
        (torch.zeros(3, COLUMNS, dtype=torch.int32), "expected float32 or bfloat16, got int32"),
        ([[0.0]], "qkv: expected a 2-D float32"),
        (None, "qkv"),
    ],
)
def test_bad_tensor_type(one, qkv, message):
    with pytest.raises(TypeError, match=message):
        one.attend(0, ints([1]), ints([3]), qkv, torch.zeros(3, SHAPE.out_columns))


def test_slots_must_be_int32(one):
    with pytest.raises(TypeError, match="slots: expected int32, got int64"):
        one.extend(np.array([1]), ints([1]))
    one.extend([1], [1])
    one.extend(torch.tensor([1], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    assert one.length(1) == 5


def test_read_only_output_is_refused(one):
    out = np.zeros((3, SHAPE.out_columns), np.float32)
    out.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        attend(one, out=out)


def test_numpy_and_torch_agree(one):
    qkv = torch.randn(3, COLUMNS)
    a, b = torch.zeros(3, SHAPE.out_columns), np.zeros((3, SHAPE.out_columns), np.float32)
    attend(one, qkv=qkv, out=a)
    attend(one, qkv=qkv.numpy(), out=b)
    assert np.array_equal(a.numpy(), b)


def test_out_of_capacity_changes_nothing(one):
    before = (one.free_blocks, one.used_tokens, one.length(1))
    with pytest.raises(KvCapacityError, match="64 tokens needed, 48 free of 64") as error:
        one.extend(ints([0, 1]), ints([50, 10]))
    assert isinstance(error.value, RuntimeError)
    assert before == (one.free_blocks, one.used_tokens, one.length(1))
    with pytest.raises(ValueError, match="slot 0 is not open"):
        one.length(0)
    one.extend(ints([0, 1]), ints([32, 29]))
    assert one.free_blocks == 0
    one.check()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"kv_dtype": "float64"}, "kv_dtype: expected float32"),
        ({"capacity_tokens": 0}, "capacity_tokens: expected at least 1"),
        ({"max_sequences": 0}, "max_sequences: expected at least 1"),
        ({"block_tokens": 0}, "block_tokens: expected at least 1"),
        ({"threads": 0}, "threads: expected 1 to"),
        ({"threads": 2, "cpus": [0]}, "one CPU per thread"),
        ({"cpus": [100000]}, "CPU 100000 is not in"),
        ({"backend": "gpu"}, "backend: expected one of"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        store(**options)


@pytest.mark.parametrize(
    "shape",
    [
        LayerShape(0, 8, 8, 4, 1.0),
        LayerShape(3, 8, 8, 4, 1.0),
        LayerShape(2, 0, 8, 4, 1.0),
        LayerShape(2, 8, 8, 4, 0.0),
        LayerShape(2, 8, 8, 4, 1.0, window=0),
        LayerShape(2, 8, 8, 4, 1.0, softcap=-1.0),
    ],
)
def test_bad_shapes(shape):
    with pytest.raises(ValueError):
        open_kv_cache([shape], kv_dtype="float32", capacity_tokens=16, max_sequences=1)


def test_forced_isa(monkeypatch):
    monkeypatch.setenv("HPCDECODE_ISA", "generic")
    assert isa() == "generic" == store().isa
    monkeypatch.setenv("HPCDECODE_ISA", "avx1024")
    with pytest.raises(ValueError, match="'avx1024' is unknown; expected one of generic"):
        store()
    with pytest.raises(UserError, match="'avx1024' is unknown"):
        isa()


def test_capacity_accounts_for_all_bytes():
    layers = [SHAPE, LayerShape(1, 33, 16, 4, 1.0)]
    per_token = bytes_per_token(layers, "bfloat16")
    assert per_token == 2 * (8 + 16) * 2 + (34 + 16) * 2  # dims padded to 2 (K) and 16 (V)
    tokens = capacity_for(layers, "bfloat16", 1 << 20)
    s = open_kv_cache(layers, kv_dtype="bfloat16", capacity_tokens=tokens, max_sequences=1)
    assert s.capacity_tokens == tokens
    assert (1 << 20) - 64 * per_token <= s.bytes <= (1 << 20) + 2 * 4096
