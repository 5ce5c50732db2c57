"""MXFP4 checkpoints (gpt-oss): experts stay in four bits."""

from __future__ import annotations

import re

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.run.weight_size import weight_bytes
from tests.support.quantised import check, check_parts, edit, kept, pair

EXPERTS = re.compile(r".*experts\.(gate_up|down)_proj")


def mxfp4(stem, weight):
    """As gpt-oss stores experts: [E, out, in / 32, 16] bytes, the lower half first, and exponents of 2."""
    generator = torch.Generator().manual_seed(len(stem) + weight.numel())
    experts, inputs, outputs = weight.shape
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
    values = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {"_blocks": blocks, "_scales": scales}, values


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


@pytest.fixture
def oss(checkpoint, tmp_path):
    return pair(checkpoint("gpt_oss"), tmp_path, mxfp4, MXFP4, EXPERTS)


def test_mxfp4_is_as_transformers_reads_it(oss):
    check(oss)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_in_mxfp4_stay_so(oss, dtype):
    assert kept(oss.quantised, dtype) == {"mx4", None}
    check_parts(oss.quantised)
    assert weight_bytes(oss.quantised, torch.bfloat16, "auto") < weight_bytes(oss.quantised, torch.bfloat16)


OSS = "model.layers.1.mlp.experts.down_proj"
OSS_FAULTS = {
    "no scales": (
        lambda t: t.pop(f"{OSS}_scales"),
        r"down_proj' \(MXFP4\): expected a tensor .*down_proj_scales' .*none",
    ),
    "shape": (lambda t: t.update({f"{OSS}_scales": t[f"{OSS}_scales"][:, :-1]}), "expected scales of shape"),
    "blocks": (
        lambda t: t.update({f"{OSS}_blocks": t[f"{OSS}_blocks"][..., :8]}),
        r"expected blocks of shape \[experts",
    ),
    "dtype": (lambda t: t.update({f"{OSS}_scales": t[f"{OSS}_scales"].float()}), "expected scales in U8, got F32"),
    "NaN": (lambda t: t[f"{OSS}_scales"].fill_(255), "expected scales that are finite"),
    "both": (
        lambda t: t.update({OSS: torch.ones(4, 128, 64)}),
        "expected one weight .*down_proj', got a quantised one and",
    ),
}


@pytest.mark.parametrize("name", OSS_FAULTS)
def test_tensors_of_experts_that_do_not_fit_are_named(name, oss):
    change, message = OSS_FAULTS[name]
    edit(oss.quantised, change)
    with pytest.raises(UserError, match=message):
        load_split(oss.quantised, dtype="float32")


def test_codes_are_nothing_without_a_scheme(oss, checkpoint):
    (oss.quantised / "config.json").write_text((checkpoint("gpt_oss") / "config.json").read_text())
    with pytest.raises(
        UserError, match=r"down_proj_blocks', which is named as quantisation data \(nothing states that\)"
    ):
        load_split(oss.quantised, dtype="float32")
