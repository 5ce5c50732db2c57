"""GPTQ and AWQ checkpoints, packed here by their written formats: the tools need compilers and other torches."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from tests.support.quantised import check, edit, kept, pair, write

MODULE = "model.layers.1.mlp.up_proj"
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def packed(codes, bits, dim, order=None):
    """Codes put into words of 32 bits along `dim`, the lowest bits first, one bit at a time. Some lie in two words."""
    codes = codes.long().movedim(dim, -1)
    if order:
        codes = codes.unflatten(-1, (-1, len(order)))[..., order].flatten(-2)
    of_each = (codes[..., None] >> torch.arange(bits) & 1).flatten(-2).unflatten(-1, (-1, 32))
    words = (of_each << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int().movedim(-1, dim)


def rounded(weight, bits, groups, symmetric):
    """Codes [in, out], scales and zero points [groups, out], and the weight [out, in] that they stand for.

    `groups` is the group of each input.
    """
    most = (1 << bits) - 1
    scales, zeros = [], []
    for g in range(int(groups.max()) + 1):
        own = weight[:, groups == g]
        least, largest = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        scale = ((largest - least) / most).half()
        zero = (-least / scale.float()).round().clamp(1, most)
        if symmetric:
            scale, zero = (own.abs().amax(1) / (most // 2)).half(), torch.full_like(zero, (most + 1) // 2)
        scales.append(scale)
        zeros.append(zero)
    scale, zero = torch.stack(scales), torch.stack(zeros)
    of_input = (t.float()[groups].t() for t in (scale, zero))
    s, z = of_input
    codes = (weight / s + z).round().clamp(0, most)
    return codes.t(), scale, zero, (codes - z) * s


def gptq(bits=4, group=32, symmetric=True, version=1, ordered=False, with_groups=True):
    def quantise(stem, weight):
        inputs = weight.shape[1]
        groups = torch.arange(inputs) // (inputs if group == -1 else group)
        if ordered:
            groups = groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(5))]
        codes, scales, zeros, values = rounded(weight, bits, groups, symmetric)
        stored = {
            "qweight": packed(codes, bits, 0),
            "qzeros": packed(zeros - int(version == 1), bits, 1),
            "scales": scales,
            "g_idx": groups.int(),
        }
        return {k: v for k, v in stored.items() if with_groups or k != "g_idx"}, values

    return quantise


def stated(bits=4, group=32, **values):
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **values}


GPTQ = {
    "groups": ({}, {}),
    "asymmetric": ({"symmetric": False}, {"sym": False}),
    "8 bits": ({"bits": 8}, {"bits": 8}),
    "3 bits": ({"bits": 3, "symmetric": False}, {"bits": 3, "sym": False}),
    "2 bits": ({"bits": 2}, {"bits": 2}),
    "one group": ({"group": -1}, {"group": -1}),
    "in order of activations": ({"ordered": True}, {"desc_act": True}),
    "without groups of inputs": ({"with_groups": False}, {}),
    "version 2": ({"version": 2, "symmetric": False}, {"checkpoint_format": "gptq_v2", "sym": False}),
    "of GPTQModel": ({}, {"checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": {"-:.*lm_head": {}}}),
}


@pytest.mark.parametrize("name", GPTQ)
def test_weights_stay_packed_unless_inputs_are_permuted(name, checkpoint, tmp_path):
    ways, values = GPTQ[name]
    made = pair(checkpoint("llama2"), tmp_path, gptq(**ways), stated(**values))
    permuted = name == "in order of activations"
    form = "Q8_0" if name == "8 bits" else "i4"
    assert kept(made.quantised, "bfloat16") == ({None} if permuted else {form, None})
    if form == "i4" and not permuted:  # their numbers are not rounded once more
        assert kept(made.quantised, "bfloat16", "int4") == {form, None}


def test_weights_of_eight_bits_with_zero_points_are_dequantised(checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, gptq(8, symmetric=False), stated(8, sym=False))
    assert kept(made.quantised, "bfloat16") == {None}


@pytest.mark.parametrize("name", GPTQ)
def test_gptq(name, checkpoint, tmp_path):
    made, own = GPTQ[name]
    check(pair(checkpoint("llama2"), tmp_path, gptq(**made), stated(**own)))


def test_biases_and_a_file_of_its_own(checkpoint, tmp_path):
    """Qwen2 has biases; AutoGPTQ's older checkpoints have quantize_config.json alone."""
    made = pair(checkpoint("qwen2"), tmp_path, gptq(), stated() | {"quant_method": None}, under="quantize_config.json")
    check(made)


def test_experts(checkpoint, tmp_path):
    experts = re.compile(r".*(experts\.\d+\.w\d|[qkvo]_proj)\.weight")
    check(pair(checkpoint("mixtral"), tmp_path, gptq(), stated(), experts))


def awq(group=32):
    def quantise(stem, weight):
        groups = torch.arange(weight.shape[1]) // (weight.shape[1] if group == -1 else group)
        codes, scales, zeros, values = rounded(weight, 4, groups, symmetric=False)
        codes, zeros = (packed(t, 4, 1, AWQ_ORDER) for t in (codes, zeros))
        return {"qweight": codes, "qzeros": zeros, "scales": scales}, values

    return quantise


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}


@pytest.mark.parametrize("name", ["llama2", "qwen2"])
def test_awq(name, checkpoint, tmp_path):
    check(pair(checkpoint(name), tmp_path, awq(), AWQ))


def test_awq_with_one_group_in_a_file_of_its_own(checkpoint, tmp_path):
    own = {"zero_point": True, "q_group_size": -1, "w_bit": 4, "version": "GEMM"}
    check(pair(checkpoint("llama2"), tmp_path, awq(-1), own, under="quant_config.json"))


def rounded_by(**values):
    """What AutoRound states."""
    own = {"bits": 4, "group_size": 32, "sym": True, "data_type": "int", "packing_format": "auto_round:auto_gptq"}
    return {"quant_method": "auto-round", "autoround_version": "0.8.0", **own, **values}


AUTO_ROUND = {
    "as GPTQ": (gptq(), rounded_by()),
    "as GPTQ, asymmetric, as older releases state it": (
        gptq(symmetric=False),
        rounded_by(
            sym=False, quant_method="intel/auto-round", packing_format=None, backend="auto_round:gptq:exllamav2"
        ),
    ),
    "as AWQ": (awq(), rounded_by(sym=False, packing_format="auto_round:auto_awq")),
}


@pytest.mark.parametrize("name", AUTO_ROUND)
def test_auto_round(name, checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, *AUTO_ROUND[name])
    check(made)
    assert kept(made.quantised, "bfloat16") == {"i4", None}


def test_auto_round_with_modules_in_other_bits(checkpoint, tmp_path):
    """By name and by pattern; a module of 16 bits is plain."""
    extra = {
        MODULE: {"bits": 8, "group_size": 16},
        r".*layers\.0\.mlp\.(gate|up)_proj": {"bits": 2},
        "model.layers.2.mlp.up_proj": {"bits": 16, "data_type": "float"},
    }

    def quantise(stem, weight):
        way = {"bits": 8, "group": 16} if stem == f"{MODULE}." else {"bits": 2} if ".0.mlp." in stem else {}
        return gptq(**way)(stem, weight)

    chosen = re.compile(r"model\.layers\.(0\.mlp\.(gate|up)|1\.mlp\.(up|down))_proj\.weight")
    check(pair(checkpoint("llama2"), tmp_path, quantise, rounded_by(extra_config=extra), chosen))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"packing_format": "auto_round"}, r"expected packing_format to be auto_round:auto_gptq .*, got 'auto_round'"),
        ({"data_type": "mx_fp"}, "expected data_type to be one of 'int', got 'mx_fp'"),
        ({"bits": 5}, "expected bits to be one of 2, 3, 4, 8, got 5"),
        ({"extra_config": {"lm_head": 4}}, "expected extra_config to be an object of objects"),
        ({"extra_config": {"(a+)+": {"bits": 8}}}, "expected a pattern of modules without nested repetitions"),
    ],
)
def test_what_auto_round_may_not_state(values, message, checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, gptq(), rounded_by(**values))
    with pytest.raises(UserError, match=message):
        load_split(made.quantised, dtype="float32")


FAULTS = {
    "no scales": (lambda t: t.pop(f"{MODULE}.scales"), r"up_proj\.weight' \(GPTQ, 4 bits\): .*up_proj\.scales' .*none"),
    "no zero points": (lambda t: t.pop(f"{MODULE}.qzeros"), r"up_proj\.qzeros' beside it, got none"),
    "no codes": (lambda t: t.pop(f"{MODULE}.qweight"), r"up_proj\.g_idx', which is named as quantisation data"),
    "shape": (
        lambda t: t.update({f"{MODULE}.scales": t[f"{MODULE}.scales"][:1]}),
        r"expected scales of shape \[2, 128\], got \[1, 128\]",
    ),
    "zero points": (
        lambda t: t.update({f"{MODULE}.qzeros": t[f"{MODULE}.qzeros"][:, :8]}),
        r"expected zero points of shape \[2, 16\], got \[2, 8\]",
    ),
    "dtype": (lambda t: t.update({f"{MODULE}.scales": t[f"{MODULE}.scales"].int()}), "expected scales in .*, got I32"),
    "NaN": (lambda t: t[f"{MODULE}.scales"][1, 7].fill_(torch.nan), "expected scales that are finite"),
    "groups": (lambda t: t[f"{MODULE}.g_idx"].add_(1), "expected groups of inputs from 0 to 1, got 1 to 2"),
    "groups of others": (
        lambda t: t.update({f"{MODULE}.g_idx": torch.zeros(32).int()}),
        r"expected groups of inputs of shape \[64\], got \[32\]",
    ),
    "zero points of no version": (
        lambda t: t[f"{MODULE}.qzeros"][0, 0].fill_(-1),
        "expected zero points below 15, as version 1 of GPTQ stores them, got 15",
    ),
    "a weight too": (
        lambda t: t.update({f"{MODULE}.weight": torch.ones(128, 64)}),
        r"expected one weight '.*up_proj\.weight', got a quantised one and another",
    ),
    "an adapter": (
        lambda t: t.update({f"{MODULE}.pre_quant_scale": torch.ones(64)}),
        r"up_proj\.pre_quant_scale', which is named as quantisation data",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_are_named(name, checkpoint, tmp_path):
    made, (change, message) = pair(checkpoint("llama2"), tmp_path, gptq(), stated()), FAULTS[name]
    edit(made.quantised, change)
    with pytest.raises(UserError, match=message):
        load_split(made.quantised, dtype="float32")


@pytest.mark.parametrize(("name", "stated_as"), [("AWQ", AWQ), ("AutoRound, as AWQ", AUTO_ROUND["as AWQ"][1])])
def test_tensors_of_awq_that_do_not_fit_are_named(name, stated_as, checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, awq(), stated_as)
    whole = load_file(made.quantised / "model.safetensors")
    few = {
        "scales": r"scales of shape \[2, 128\], got \[1, 128\]",
        "qzeros": r"zero points of shape \[2, 16\], got \[1, 16\]",
    }
    for part, message in few.items():
        write(made.quantised, {k: t for k, t in whole.items() if k != f"{MODULE}.{part}"})
        with pytest.raises(UserError, match=rf"up_proj\.weight' \({name}\): .*up_proj\.{part}' .*none"):
            load_split(made.quantised, dtype="float32")
        write(made.quantised, {k: t[:1] if k == f"{MODULE}.{part}" else t for k, t in whole.items()})
        with pytest.raises(UserError, match=f"expected {message}"):
            load_split(made.quantised, dtype="float32")


def test_a_bias_that_the_model_lacks_is_left_out_if_it_is_zero(checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, gptq(), stated())
    edit(made.quantised, lambda t: t.update({f"{MODULE}.bias": torch.zeros(128)}))
    check(made)
    edit(made.quantised, lambda t: t[f"{MODULE}.bias"][5].fill_(1))
    with pytest.raises(UserError, match=r"a bias '.*up_proj\.bias', which the model does not have"):
        load_split(made.quantised, dtype="float32")


def test_scales_of_an_activation_are_refused(checkpoint, tmp_path):
    """AWQ scales the outputs of GELU in some models."""
    made = pair(checkpoint("llama2"), tmp_path, awq(), AWQ)
    edit(made.quantised, lambda t: t.update({"model.layers.1.mlp.act.scales": torch.ones(128)}))
    with pytest.raises(UserError, match=r"mlp\.act\.scales', which is named as quantisation data"):
        load_split(made.quantised, dtype="float32")


def test_another_group_size_is_refused(checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, awq(), {**AWQ, "group_size": 16})
    with pytest.raises(UserError, match=r"\(AWQ\): expected scales of shape \[8, 64\], got \[4, 64\]"):
        load_split(made.quantised, dtype="float32")


@pytest.mark.parametrize("own", [{"dynamic": {"+:.*up": {"bits": 8}}}, {"rotation": "hadamard"}, {"adapter": {"r": 4}}])
def test_what_gptqmodel_adds_to_the_format_is_refused(own, checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, gptq(), stated(**own))
    with pytest.raises(UserError, match=next(iter(own))):
        load_split(made.quantised, dtype="float32")
