"""Checkpoints of bitsandbytes, in 8 and in 4 bits, quantised and dequantised by itself."""

from __future__ import annotations

import pytest
import torch

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.quantization.bitsandbytes import FourBits
from tests.support.quantised import check, edit, kept, pair

functional = pytest.importorskip("bitsandbytes.functional")

UP = "model.layers.1.mlp.up_proj.weight"


def eight_bits(stem, weight):
    codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
    values = functional.int8_vectorwise_dequant(codes, largest)
    return {"weight": codes, "SCB": largest, "weight_format": torch.zeros((), dtype=torch.uint8)}, values.float()


def four_bits(kind="nf4", nested=False, block=64):
    def quantise(stem, weight):
        options = dict(quant_type=kind, compress_statistics=nested, blocksize=block)
        codes, about = functional.quantize_4bit(weight, **options)
        tensors = {f"weight.{name}": t for name, t in about.as_dict(packed=True).items()}
        return {"weight": codes, **tensors}, values_of(codes, about) if block > 64 else functional.dequantize_4bit(
            codes, about
        )

    return quantise


def values_of(codes, about):
    """The weight by the written format: bitsandbytes' own code for CPUs wants whole blocks in a row."""
    scales = about.absmax
    if about.nested:
        scales = functional.dequantize_blockwise(about.absmax, about.state2) + about.offset
    q = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], 1).flatten().int()
    return (about.code[q] * scales.repeat_interleave(about.blocksize)[: len(q)])[: about.shape.numel()].view(
        about.shape
    )


EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}


def four(kind="nf4"):
    return {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind}


def test_eight_bits(checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, eight_bits, EIGHT)
    check(made)
    assert kept(made.quantised, "float32") == kept(made.quantised, "bfloat16") == {"i8", None}


@pytest.mark.parametrize("block", [64, 256, 4096])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits(kind, nested, block, checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, four_bits(kind, nested, block), four(kind))
    check(made)
    form = "nf4" if kind == "nf4" else None
    assert kept(made.quantised, "float32") == kept(made.quantised, "bfloat16") == {form, None}


def test_another_table_than_that_of_nf4_is_dequantised(checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, four_bits(), four())
    edit(made.quantised, lambda tensors: [t.mul_(0.5) for key, t in tensors.items() if key.endswith("quant_map")])
    assert kept(made.quantised, "bfloat16") == {None}


def test_rows_of_any_length():
    """Blocks begin and end within rows, rows within bytes, and the last block is ragged."""
    weight = torch.randn(7, 37)
    codes, about = functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    form = FourBits.of("nf4")
    state = about.as_dict(packed=True)
    tensors = {"codes": codes, "absmax": about.absmax, "quant_map": about.code}
    parts = form.prepared({**tensors, "state": state["quant_state.bitsandbytes__nf4"]}, (7, 37))
    for first, last in ((0, 7), (1, 2), (2, 6), (5, 7)):
        assert torch.equal(form.rows(parts, first, last), values_of(codes, about)[first:last])


STATE = f"{UP}.quant_state.bitsandbytes__nf4"
FAULTS = {
    "no absmax": (
        lambda t: t.pop(f"{UP}.absmax"),
        r"expected a tensor '.*up_proj\.weight\.absmax' beside it, got none",
    ),
    "no state": (lambda t: t.pop(STATE), "expected a tensor '.*bitsandbytes__nf4' beside it, got none"),
    "no nested absmax": (
        lambda t: t.pop(f"{UP}.nested_absmax"),
        "expected nested_absmax beside a nested absmax, got none",
    ),
    "another table": (lambda t: t.update({STATE: changed(t[STATE], b"nf4", b"fp4")}), "expected a description of nf4"),
    "a block of all": (
        lambda t: t.update({STATE: changed(t[STATE], b": 64,", b": 640000000000,")}),
        "expected a description of nf4",
    ),
    "deep JSON": (
        lambda t: t.update({STATE: torch.tensor(list(b'{"x":' + b"[" * 60000), dtype=torch.uint8)}),
        "expected bitsandbytes' description of a weight, got",
    ),
    "long": (lambda t: t.update({STATE: torch.zeros(1 << 17, dtype=torch.uint8)}), "a description of at most 65536"),
    "no JSON": (lambda t: t.update({STATE: t[STATE][:-3]}), "expected bitsandbytes' description of a weight, got"),
    "no block": (lambda t: t.update({STATE: changed(t[STATE], b": 64,", b": 0,")}), "expected a description of nf4"),
    "shape": (
        lambda t: t.update({STATE: changed(t[STATE], b"[128, 64]", b"[128, 32]")}),
        r"codes of shape \[2048, 1\] or",
    ),
    "absmax": (lambda t: t.update({f"{UP}.absmax": t[f"{UP}.absmax"][:-1]}), r"absmax of shape \[128\], got \[127\]"),
    "NaN": (lambda t: t[f"{UP}.nested_absmax"].fill_(torch.nan), "expected absmax that are finite"),
}


def changed(state, old, new):
    text = bytes(state.tolist())
    assert old in text
    return torch.tensor(list(text.replace(old, new)), dtype=torch.uint8)


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_are_named(name, checkpoint, tmp_path):
    made, (change, message) = pair(checkpoint("llama2"), tmp_path, four_bits(nested=True), four()), FAULTS[name]
    edit(made.quantised, change)
    with pytest.raises(UserError, match=message):
        load_split(made.quantised, dtype="float32")


EIGHT_FAULTS = {
    "no SCB": (lambda t: t.pop(UP.replace("weight", "SCB")), r"expected a tensor '.*up_proj\.SCB' beside it, got none"),
    "SCB": (
        lambda t: t.update({UP.replace("weight", "SCB"): torch.ones(64)}),
        r"expected SCB of shape \[128\] or \[128, 1\], got \[64\]",
    ),
    "layout": (
        lambda t: t.update({UP.replace("weight", "weight_format"): torch.ones((), dtype=torch.uint8)}),
        "expected the weight format 0",
    ),
}


@pytest.mark.parametrize("name", EIGHT_FAULTS)
def test_tensors_of_eight_bits_that_do_not_fit_are_named(name, checkpoint, tmp_path):
    made, (change, message) = pair(checkpoint("llama2"), tmp_path, eight_bits, EIGHT), EIGHT_FAULTS[name]
    edit(made.quantised, change)
    with pytest.raises(UserError, match=message):
        load_split(made.quantised, dtype="float32")
