"""GGUF files are untrusted: whatever is cut off, damaged or unknown in them is refused by name, within bounds."""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import transformers

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.gguf.header import read_header
from hpcdecode.model.frontend.gguf.tensors import block_sizes
from tests.support.gguf_files import write
from tests.support.models import SHAPE, save

U32, TEXT, ARRAY = 4, 8, 9


def text(value: str | bytes) -> bytes:
    value = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(value)) + value


def header(values: list[bytes] | None = None, tensors: list[bytes] | None = None, version=3, **counts) -> bytes:
    values, tensors = values or [], tensors or []
    counts = struct.pack("<QQ", counts.get("tensors", len(tensors)), counts.get("values", len(values)))
    return b"GGUF" + struct.pack("<I", version) + counts + b"".join(values + tensors)


def tensor(name="a", sides=(32,), kind=0, first=0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, first)


def value(key: str, kind: int, content: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + content


BROKEN = {
    "empty": (b"", "cannot mmap an empty file"),
    "magic": (b"PK\3\4" + bytes(64), "expected it to begin with b'GGUF'"),
    "version": (header(version=1), "version 2 or 3"),
    "other byte order": (header(version=3 << 24), "version 2 or 3"),
    "tensors": (header()[:8] + b"\xff" * 16, "at most .* tensors"),
    "count of values": (header()[:16] + b"\xff" * 8, "at most .* values of metadata"),
    "text": (header([struct.pack("<Q", 1 << 60)]), "at most 4,096 bytes of a text"),
    "cut text": (header([struct.pack("<Q", 100)]), "expected 100 more bytes"),
    "not text": (header([value("k", TEXT, text(b"\xff\xfe"))]), "can't decode"),
    "type": (header([value("k", 99, b"")]), "a type of metadata from 0 to 12, got 99"),
    "array": (header([value("k", ARRAY, struct.pack("<IQ", 0, 1 << 62))]), "at most .* elements of an array"),
    "cut array": (header([value("k", ARRAY, struct.pack("<IQ", 0, 1 << 20))]), "1,048,576 more bytes"),
    "nested array": (header([value("k", ARRAY, struct.pack("<IQIQ", 9, 1, 9, 1))]), "numbers or texts, got type 9"),
    "twice": (header([value("k", U32, bytes(4))] * 2), "one value 'k', got two"),
    "alignment": (header([value("general.alignment", U32, struct.pack("<I", 3))]), "a power of two"),
    "dimensions": (header(tensors=[tensor(sides=(2,) * 5)]), "1 to 4 dimensions, got 5"),
    "no element": (header(tensors=[tensor(sides=(32, 0))]), "1 to 2\\^48 elements"),
    "elements": (header(tensors=[tensor(sides=(1 << 40, 1 << 40))]), "1 to 2\\^48 elements"),
    "block type": (header(tensors=[tensor(kind=250)]), "a block type that can be dequantised, got 250"),
    "integers": (header(tensors=[tensor(kind=26)]), "a block type that can be dequantised, got 26"),
    "columns": (header(tensors=[tensor(sides=(33,), kind=8)]), "rows of blocks of 32, got 33"),
    "beyond the end": (header(tensors=[tensor()]), "128 bytes at a multiple of 32"),
    "far beyond": (header(tensors=[tensor(first=(1 << 64) - 32)]) + bytes(512), "at a multiple of 32"),
    "odd place": (header(tensors=[tensor(first=1)]) + bytes(512), "at a multiple of 32"),
    "two of a name": (header(tensors=[tensor(), tensor()]) + bytes(512), "one tensor 'a', got two"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_header(name, tmp_path):
    content, expected = BROKEN[name]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(UserError, match=f"x.gguf is truncated or not a GGUF file: .*{expected}"):
        read_header(tmp_path / "x.gguf", block_sizes())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    source = save(transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False), folder / "source")
    return write(source, folder, "llama", lambda name: "Q8_0").file


def test_a_file_cut_off_anywhere(made, tmp_path):
    content = made.read_bytes()
    for size in np.linspace(0, len(content) - 1, 40, dtype=int):
        (tmp_path / "cut.gguf").write_bytes(content[:size])
        with pytest.raises(UserError, match=r"cut\.gguf is truncated"):
            load_split(tmp_path / "cut.gguf", dtype="float32")


def test_random_bytes_in_the_header_end_in_a_header_or_an_error(made, tmp_path):
    content, rng, sizes = made.read_bytes(), np.random.default_rng(0), block_sizes()
    end = read_header(made, sizes).nbytes
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for at in rng.integers(end, size=4):
            damaged[at] = rng.integers(256)
        (tmp_path / "x.gguf").write_bytes(damaged)
        try:
            read_header(tmp_path / "x.gguf", sizes)
        except UserError:
            refused += 1
    assert 0 < refused < 150


@pytest.mark.parametrize(
    ("architecture", "extra", "expected"),
    [
        ("mamba", {}, "one of the architectures llama, .* got 'mamba'"),
        ("llama", {"expert_count": 8}, "no experts in the architecture 'llama', got 8"),
        ("llama", {"attention.sliding_window": 8}, "no sliding window"),
        ("llama", {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0}, "by linear or yarn, got 'longrope'"),
        ("llama", {"rope.freq_base": "2"}, r"one finite number above 0 of llama\.rope\.freq_base, got '2'"),
        ("llama", {"rope.freq_base": float("nan")}, r"one finite number above 0 of llama\.rope\.freq_base, got nan"),
        ("llama", {"rope.dimension_count": 0}, r"one finite number above 0 of llama\.rope\.dimension_count, got 0"),
        ("llama", {"attention.head_count": 128}, "embedding_length of attention.head_count or more, got 64 and 128"),
    ],
)
def test_a_model_that_it_cannot_be(architecture, extra, expected, made, tmp_path):
    source = made.parent / "source"
    file = write(source, tmp_path, "llama", lambda name: "F16", **extra).file
    if architecture != "llama":  # a name of as many letters, wherever it is
        file.write_bytes(file.read_bytes().replace(b"llama", architecture.encode()))
    with pytest.raises(UserError, match=expected):
        load_split(file, dtype="float32")


def test_a_tensor_that_the_model_does_not_have(made, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(made.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))
    with pytest.raises(UserError, match=r"'blk\.1\.ffn_xx\.weight' is not one of the architecture 'llama'"):
        load_split(file, dtype="float32")


def test_parts_of_another_model(made, tmp_path):
    source = made.parent / "source"
    first = write(source, tmp_path, "llama", lambda name: "F16", parts=2).file
    second = first.with_name("model-00002-of-00002.gguf")
    second.write_bytes(first.read_bytes())
    with pytest.raises(UserError, match="each tensor in one of 2 files"):
        load_split(first, dtype="float32")
    second.unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.gguf"):
        load_split(first, dtype="float32")


def test_weights_that_are_not_numbers(made, tmp_path):
    entry = read_header(made, block_sizes()).tensors["blk.0.attn_v.weight"]
    assert entry.type == gguf.GGMLQuantizationType.Q8_0
    content = bytearray(made.read_bytes())
    content[entry.first : entry.first + entry.nbytes] = b"\xff" * entry.nbytes
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UserError, match="v_proj"):
        load_split(tmp_path / "model.gguf", dtype="float32")
