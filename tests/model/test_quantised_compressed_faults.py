"""Checkpoints of compressed-tensors whose tensors do not fit, or whose weights are not known, are refused by name."""

from __future__ import annotations

import shutil

import pytest
import torch

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from tests.support.quantised import edit, state

pytest.importorskip("compressed_tensors")
from tests.support.compressed import FORMATS, UP, packed, stated

FAULTS = {
    "no scale": ("int4 groups", lambda t: t.pop(f"{UP}_scale"), "expected a tensor '.*up_proj.weight_scale' beside it"),
    "no shape": ("int4 groups", lambda t: t.pop(f"{UP}_shape"), "expected a tensor '.*up_proj.weight_shape' beside it"),
    "no zero points": (
        "int4 groups, zero points",
        lambda t: t.pop(f"{UP}_zero_point"),
        "expected a tensor '.*up_proj.weight_zero_point' beside it",
    ),
    "zero points too many": (
        "int4 groups",
        lambda t: t.update({f"{UP}_zero_point": torch.zeros(16, 2).int()}),
        "weight_zero_point', which is named as quantisation data",
    ),
    "shape": (
        "int4 groups",
        lambda t: t[f"{UP}_shape"].mul_(2),
        r"expected codes of shape \[256, 16\], got \[128, 8\]",
    ),
    "no shape at all": (
        "int4 groups",
        lambda t: (
            t.update({f"{UP}_packed": torch.zeros(128, 0).int()}),
            t[f"{UP}_shape"].copy_(torch.tensor([128, -7])),
        ),
        r"expected a matrix or a stack of matrices, got the shape \[128, -7\]",
    ),
    "another shape": (
        "int4 groups",
        lambda t: t[f"{UP}_shape"].copy_(torch.tensor([-1, 64])),
        r"expected codes of shape \[-1, 8\], got",
    ),
    "group size": (
        "int4 groups",
        lambda t: t.update({f"{UP}_scale": t[f"{UP}_scale"].repeat(1, 2)}),
        r"expected scales of shape \[128, 2\], got \[128, 4\]",
    ),
    "infinite scale": (
        "int4 groups",
        lambda t: t[f"{UP}_scale"][3].fill_(torch.inf),
        "expected scales that are finite",
    ),
    "no overall scale": (
        "NVFP4",
        lambda t: t.pop(f"{UP}_global_scale"),
        "expected a tensor '.*global_scale' beside it",
    ),
    "overall scale is zero": ("NVFP4", lambda t: t[f"{UP}_global_scale"].zero_(), "expected scales that are finite"),
    "scales in float32": (
        "NVFP4",
        lambda t: t.update({f"{UP}_scale": t[f"{UP}_scale"].float()}),
        "expected scales in F8_E4M3, got F32",
    ),
    "gaps, as of older releases": (
        "int3 groups",
        lambda t: t.update({f"{UP}_packed": torch.zeros(128, 7).int()}),
        "expected codes of 3 bits without gaps, as compressed-tensors 0.20 packs them",
    ),
    "bytes of FP6": (
        "MXFP6",
        lambda t: t.update({f"{UP}_packed": t[f"{UP}_packed"][:, :47]}),
        "expected codes in a multiple of 3 bytes, got 47",
    ),
    "channel scales": (
        "FP8 channels",
        lambda t: t.update({f"{UP}_scale": torch.ones(1)}),
        r"expected scales of shape \[128, 1\] or \[128\], got \[1\]",
    ),
}


@pytest.fixture(scope="module")
def copy_of(checkpoint, tmp_path_factory):
    """Copy a checkpoint in a format, by name, to a folder; each is packed once."""
    folder, made = tmp_path_factory.mktemp("packed"), {}

    def copy(name, to):
        if name not in made:
            made[name] = packed(name, checkpoint("llama2"), folder / name).quantised
        return shutil.copytree(made[name], to / "model")

    return copy


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_are_named(name, copy_of, tmp_path):
    kind, change, message = FAULTS[name]
    if kind not in FORMATS:
        pytest.skip(f"this release of compressed-tensors does not pack {kind}")
    model = copy_of(kind, tmp_path)
    edit(model, change)
    with pytest.raises(UserError, match=message):
        load_split(model, dtype="float32")


REFUSED = {
    "bits": ({"num_bits": 1}, "num_bits to be one of 2, 3, 4, 5, 6, 7, 8, got 1"),
    "type": ({"type": "float"}, "type to be one of 'int', got 'float'"),
    "strategy": ({"strategy": "token"}, "strategy to be one of 'tensor', .* got 'token'"),
    "no strategy": ({"strategy": None}, "strategy to be one of 'tensor', .* got ''"),
    "group size": ({"group_size": -5}, "group_size to be a positive integer, got -5"),
    "zero point of all": ({"strategy": "tensor", "symmetric": False}, "zero points by channel or by group"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_are_not_known_are_refused(name, copy_of, tmp_path):
    change, message = REFUSED[name]
    own, model = stated(*FORMATS["int4 groups"]), copy_of("int4 groups", tmp_path)
    own["config_groups"]["group_0"]["weights"].update(change)
    state(model, own)
    with pytest.raises(UserError, match=rf"compressed-tensors \(format pack-quantized.*\), where .*{message}"):
        load_split(model, dtype="float32")
