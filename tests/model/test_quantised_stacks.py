"""FP8 experts in one tensor, [E, out, in] or [E, in, out]: scales by block, expert, row or column; MXFP8."""

from __future__ import annotations

import re

import pytest
import torch
import transformers

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.run.load import ModelPart
from hpcdecode.model.run.weight_size import weight_bytes
from tests.support.models import SHAPE, save
from tests.support.quantised import check, check_parts, edit, forms, kept, pair

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
EXPERTS = re.compile(r".*experts\.(gate_up|down)_proj")


@pytest.fixture
def stacked(tmp_path):
    """Qwen3-MoE whose experts are one tensor, [E, out, in], as transformers holds them."""
    config = transformers.Qwen3MoeConfig(
        **{**SHAPE, "hidden_size": 128, "num_hidden_layers": 2},
        **dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, head_dim=32, norm_topk_prob=True),
    )
    source = save(config, tmp_path / "source")

    def stack(tensors):
        for layer in range(2):
            stem = f"model.layers.{layer}.mlp.experts"
            each = [
                [tensors.pop(f"{stem}.{e}.{name}_proj.weight") for e in range(4)] for name in ("gate", "up", "down")
            ]
            gate, up, down = map(torch.stack, each)
            tensors.update({f"{stem}.gate_up_proj": torch.cat([gate, up], 1), f"{stem}.down_proj": down})

    edit(source, stack)
    return source


SCALES = {  # of experts [E, rows, columns]: dimensions whose largest value a scale is of, and the shape that is stored
    "blocks": (None, None),
    "columns": (1, None),
    "rows": (2, None),
    "rows, flat": (2, lambda s: s.squeeze(2)),
    "experts": ((1, 2), None),
    "experts, flat": ((1, 2), lambda s: s.flatten()),
    "all": ((0, 1, 2), lambda s: s.reshape(())),
}


def fp8_experts(scales):
    """What quantises experts in one tensor with one of SCALES."""
    dims, shape = SCALES[scales]

    def quantise(stem, weight):
        if dims is None:
            most = weight.unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).abs().amax((2, 4))
            wide = most.repeat_interleave(128, 1).repeat_interleave(128, 2)
        else:
            most = wide = weight.abs().amax(dims, keepdim=True)
        codes = (weight / wide * 448).to(torch.float8_e4m3fn)
        return {"": codes, "_scale_inv": (shape(most) if shape else most) / 448}, codes.float() * (wide / 448)

    return quantise


def states(scales):
    return {**FP8, **({"weight_block_size": [128, 128]} if scales == "blocks" else {})}


@pytest.mark.parametrize("scales", SCALES)
def test_experts_in_one_tensor_of_fp8_stay_so(scales, stacked, tmp_path):
    """Unless inputs have scales of their own."""
    made = pair(stacked, tmp_path, fp8_experts(scales), states(scales), EXPERTS)
    check(made)
    forms = {None} if scales == "columns" else {"f8", None}
    assert kept(made.quantised, "bfloat16") == forms
    if scales == "blocks":
        assert kept(made.quantised, "float32") == forms
        assert weight_bytes(made.quantised, torch.bfloat16, "auto") < weight_bytes(made.quantised, torch.bfloat16)
        parts = [load_split(made.quantised, dtype="float32", quantised="auto", part=ModelPart(2, 1, ep=True))]
        parts += [load_split(made.quantised, dtype="float32", quantised="auto", part=ModelPart(2, 1))]  # cuts blocks
        bits = [{r.bits for s in m._slices.values() for t in s.stretches for r in t.compiled.recipes} for m in parts]
        assert bits == [{"f8", None}, {"f8", None}]
        check_parts(made.quantised)


@pytest.mark.parametrize("scales", ["columns", "rows", "experts"])
def test_experts_that_are_transposed_stay_fp8_by_their_columns(scales, checkpoint, tmp_path):
    """As gpt-oss and Llama 4 hold them: [E, in, out]."""
    made = pair(checkpoint("gpt_oss"), tmp_path, fp8_experts(scales), states(scales), EXPERTS)
    check(made)
    assert kept(made.quantised, "float32") == ({None} if scales == "rows" else {"f8", None})
    check_parts(made.quantised)


def mxfp8_experts(stem, weight):
    """FP8 numbers times a power of two for 32 inputs."""
    groups = weight.unflatten(2, (-1, 32))
    exponents = (groups.abs().amax(3) / 448).log2().ceil()
    codes = (groups / exponents.exp2()[..., None]).to(torch.float8_e4m3fn)
    own = {"": codes.flatten(2), "_scale_inv": (exponents + 127).to(torch.uint8)}
    return own, (codes.float() * exponents.exp2()[..., None]).flatten(2)


def test_experts_in_one_tensor_of_mxfp8_stay_so(stacked, tmp_path):
    """In the parts of members too, whose 64 of 128 inputs are whole groups."""
    made = pair(stacked, tmp_path, mxfp8_experts, {**FP8, "scale_fmt": "ue8m0", "weight_block_size": [1, 32]}, EXPERTS)
    check(made)
    for dtype in ("float32", "bfloat16"):
        assert kept(made.quantised, dtype) == {"mx8", None}
    check_parts(made.quantised)
    for part in (ModelPart(2, 1, ep=True), ModelPart(2, 1)):
        assert set(forms(load_split(made.quantised, dtype="float32", quantised="auto", part=part))) == {
            "mx8",
            None,
        }


def test_scales_of_other_experts_are_refused(stacked, tmp_path):
    made = pair(stacked, tmp_path, fp8_experts("rows"), FP8, EXPERTS)
    edit(made.quantised, lambda t: t.update({"model.layers.0.mlp.experts.down_proj_scale_inv": torch.ones(3, 128, 1)}))
    with pytest.raises(UserError, match=r"expected scales of shape \[4, 128, 1\] or \[4, 128\], got \[3, 128, 1\]"):
        load_split(made.quantised, dtype="float32")
