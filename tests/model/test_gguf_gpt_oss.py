"""GGUF files of gpt-oss: experts whose gates and other outputs, in turn in its checkpoint, are tensors of their own."""

from __future__ import annotations

import pytest
import torch
import transformers

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.config import read_config
from hpcdecode.model.frontend.gguf import checkpoint as gguf_checkpoint
from hpcdecode.model.run.load import ModelPart
from hpcdecode.model.run.weight_size import weight_bytes
from tests.support.gguf_files import GPT_OSS, GPT_OSS_VALUES, write
from tests.support.models import save
from tests.support.quantised import check_parts, forms
from tests.support.steps import Attention, step

UP = "blk.1.ffn_up_exps.weight"


def make(tmp_path, kind="MXFP4"):
    config = transformers.GptOssConfig(**GPT_OSS, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    source = save(config, tmp_path / "source")
    return write(source, tmp_path, "gpt-oss", lambda own: kind if "_exps" in own else "Q8_0", **GPT_OSS_VALUES)


@pytest.fixture
def made(tmp_path):
    return make(tmp_path)


def logits(path, dtype, **options):
    model = load_split(path, dtype=dtype, **options)
    return step(model, Attention(model), [(0, i, 7 * i % 500 + 2) for i in range(9)], list(range(9)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_stay_in_mxfp4(made, dtype):
    assert {"MXFP4", "Q8_0"} <= set(forms(load_split(made.file, dtype=dtype, quantised="auto")))
    kept, whole, plain = logits(made.file, dtype, quantised="auto"), logits(made.file, dtype), logits(made.plain, dtype)
    assert torch.equal(kept, whole) and torch.equal(whole, plain)
    assert weight_bytes(made.file, torch.bfloat16, "auto") < 0.6 * weight_bytes(made.file, torch.bfloat16)


@pytest.mark.parametrize(("kind", "kept"), [("F16", "float16"), ("Q8_0", "Q8_0"), ("Q4_0", "Q4_0")])
def test_experts_in_other_types(tmp_path, kind, kept):
    """Blocks of GGUF go along the inputs, and so by the columns of this weight."""
    made = make(tmp_path, kind)
    found = load_split(made.file, dtype="float32", quantised="auto")
    assert {r.bits for s in found._slices.values() for t in s.stretches for r in experts_of(t.compiled)} == {kept}
    assert torch.equal(logits(made.file, "float32", quantised="auto"), logits(made.plain, "float32"))
    check_parts(made.file)


def experts_of(compiled):
    return [recipe for recipe in compiled.recipes if recipe.form.endswith("experts")]


@pytest.mark.parametrize("ep", [False, True])
def test_members_have_the_parts_that_they_have_of_the_checkpoint(made, ep):
    for member in range(2):
        found, plain = (
            load_split(path, dtype="float32", quantised=None, part=ModelPart(2, member, ep=ep))
            for path in (made.file, made.plain)
        )
        both = [[w for i in range(4) for s in m._slices[i].stretches for w in s.weights] for m in (found, plain)]
        for own, other in zip(*both, strict=True):
            assert not isinstance(own, torch.Tensor) or torch.equal(own, other)


def test_rotary_frequencies_are_scaled_as_the_file_says(made):
    assert read_config(made.file).rope_parameters["rope_type"] == "default"


def missing(tensors):
    return {name: entry for name, entry in tensors.items() if name != UP}


def smaller(tensors):
    experts, outputs, inputs = tensors[UP].shape
    return {**tensors, UP: tensors[UP]._replace(shape=(experts, outputs // 2, inputs), nbytes=tensors[UP].nbytes // 2)}


def flat(tensors):
    return {**tensors, UP: tensors[UP]._replace(shape=tensors[UP].shape[:1])}


FAULTS = {
    missing: r"expected tensors 'blk\.1\.ffn_gate_exps\.weight' and 'blk\.1\.ffn_up_exps\.weight' of one shape, got "
    r"'blk\.1\.ffn_gate_exps\.weight' \[4, 128, 64\];",
    smaller: r"'blk\.1\.ffn_up_exps\.weight' \[4, 64, 64\]",
    flat: r"expected \[experts, rows, columns\], got \[4\]",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_do_not_fit_are_named(made, monkeypatch, fault):
    def damaged(files):
        return [header._replace(tensors=fault(header.tensors)) for header in read(files)]

    read = gguf_checkpoint.read_headers
    monkeypatch.setattr(gguf_checkpoint, "read_headers", damaged)
    with pytest.raises(UserError, match=FAULTS[fault]):
        load_split(made.file, dtype="float32")
