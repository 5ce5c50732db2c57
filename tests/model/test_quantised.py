"""Quantised weights that are not understood are refused by name, whatever states them, on cold and on warm starts."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.frontend.plausible import check_values, implausible
from hpcdecode.model.frontend.quantization.stated import read_scheme
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.system.model_path import demo_directory

PROJECTION = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def llama(checkpoint, tmp_path):
    return shutil.copytree(checkpoint("llama2"), tmp_path / "model")


def load(path):
    return load_split(path, dtype="float32")


def edit(path, change):
    """Apply `change` to the dict of the checkpoint's tensors."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, path / "model.safetensors", {"format": "pt"})


def state(path, **values):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **values}))


def write(path, name, text):
    (path / name).write_text(text)


COMPRESSED = {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"group_0": {}}}
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "channel"}}
STATED = {
    "method": (lambda p: state(p, quantization_config={"quant_method": "aqlm", "bits": 2}), r"aqlm \(bits 2\)"),
    "no method": (lambda p: state(p, quantization_config={"weird": 1}), "an unnamed method"),
    "bits": (
        lambda p: state(p, quantization_config={"quant_method": "gptq", "bits": 5}),
        r"gptq \(bits 5\), where expected bits to be one of 2, 3, 4, 8, got 5",
    ),
    "group size": (
        lambda p: state(p, quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 0}),
        "group_size to be a positive integer, got 0",
    ),
    "marlin": (
        lambda p: state(p, quantization_config={"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}),
        "checkpoint_format to be one of 'gptq', 'gptq_v2', got 'marlin'",
    ),
    "gemv": (
        lambda p: state(p, quantization_config={"quant_method": "awq", "bits": 4, "version": "GEMV"}),
        "version to be one of 'gemm', got 'gemv'",
    ),
    "block": (
        lambda p: state(p, quantization_config={"quant_method": "fp8", "weight_block_size": [128]}),
        r"a block of two positive integers, got \[128\]",
    ),
    "no groups": (
        lambda p: state(p, compression_config={**COMPRESSED, "config_groups": None}),
        "config_groups to be an object of objects, got None",
    ),
    "format": (
        lambda p: state(p, compression_config={**COMPRESSED, "config_groups": {"group_0": GROUP}}),
        "format to be one of pack-quantized, .*, got 'marlin-24'",
    ),
    "in text_config": (
        lambda p: state(p, text_config={"compression_config": {**COMPRESSED, "config_groups": {"g": GROUP}}}),
        "marlin-24",
    ),
    "class": (
        lambda p: state(p, compression_config={**COMPRESSED, "config_groups": {"g": {"targets": ["Conv2d"]}}}),
        "of the class Linear, got 'Conv2d'",
    ),
    "slow pattern": (
        lambda p: state(p, compression_config={**COMPRESSED, "ignore": ["re:(a+)+b"]}),
        "nested repetition",
    ),
    "no pattern": (lambda p: state(p, compression_config={**COMPRESSED, "ignore": ["re:("]}), "a pattern of modules"),
    "rotations": (
        lambda p: state(p, compression_config={**COMPRESSED, "transform_config": {"R1": {}}}),
        "no transform_config",
    ),
    "sparsity": (
        lambda p: state(p, compression_config={**COMPRESSED, "sparsity_config": {"format": "sparse-24-bitmask"}}),
        "format to be one of 'dense', got 'sparse-24-bitmask'",
    ),
    "mlx": (lambda p: state(p, quantization={"group_size": 64, "bits": 4}), r"an unnamed method \(bits 4\)"),
    "ModelOpt": (
        lambda p: write(p, "hf_quant_config.json", '{"quantization": {"quant_algo": "W4A8_AWQ"}}'),
        r"hf_quant_config\.json: .*quant_algo W4A8_AWQ.*expected quant_algo to be one of",
    ),
    "AutoGPTQ": (lambda p: write(p, "quantize_config.json", '{"bits": 2}'), r"quantize_config\.json: .*bits 2"),
    "two methods": (
        lambda p: (
            write(p, "quantize_config.json", '{"bits": 4, "group_size": 64}'),
            state(p, quantization_config={"quant_method": "fp8"}),
        ),
        "quantised by fp8 and by gptq",
    ),
}


@pytest.mark.parametrize("name", STATED)
def test_stated_quantisation_that_is_not_known_is_refused(name, llama):
    change, message = STATED[name]
    change(llama)
    with pytest.raises(UserError, match=message) as raised:
        load(llama)
    assert "expected weights in bfloat16" in str(raised.value) and "dequantise" in str(raised.value)


SOUND = {
    "fp8": {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "mxfp4": {},
    "gptq": {"bits": 4, "group_size": 128, "checkpoint_format": "gptq", "pack_dtype": "int32", "dynamic": {"-:x": {}}},
    "awq": {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True},
    "modelopt": {"quant_algo": "NVFP4", "group_size": 16},
    "bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "compressed-tensors": {
        "format": "pack-quantized",
        "config_groups": {
            "g": {
                "targets": ["Linear", "re:x", "y"],
                "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
            }
        },
        "ignore": ["lm_head"],
        "sparsity_config": {"format": "dense"},
    },
}
STRANGE = [None, True, 3, -1, 1.5, 1 << 70, "x", "", [], [1], ["re:["], {}, {"x": 1}, [[1, 2]], {"quantized_layers": 1}]


@pytest.mark.parametrize("method", SOUND)
def test_whatever_is_stated_is_known_or_refused(method, tmp_path):
    """Values of any type in any place end in a scheme or a message, never in another error."""

    def places(value, path=()):
        yield path
        for key in value if isinstance(value, dict) else ():
            yield from places(value[key], (*path, key))

    def replaced(value, path, new):
        return {**value, path[0]: replaced(value[path[0]], path[1:], new)} if path else new

    config = {"quantization_config": {"quant_method": method, **SOUND[method]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_scheme(tmp_path) is not None
    refusals = 0
    for path in places(config):
        for new in STRANGE:
            (tmp_path / "config.json").write_text(json.dumps(replaced(config, path, new) if path else {"x": new}))
            try:
                read_scheme(tmp_path)
            except UserError:
                refusals += 1
    assert refusals > 10


def test_many_modules_are_found_at_once(tmp_path):
    names = [f"model.layers.{i}.mlp.experts.{j}.up_proj" for i in range(60) for j in range(256)]
    layers = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {name: {"quant_algo": "FP8"} for name in names}}
    groups = {**COMPRESSED, "config_groups": {"g": {"targets": names}}, "ignore": names}
    for name, own in (("hf_quant_config.json", layers), ("config.json", {"compression_config": groups})):
        folder = tmp_path / name.removesuffix(".json")
        folder.mkdir()
        (folder / name).write_text(json.dumps({"quantization": own} if name.startswith("hf") else own))
        scheme = read_scheme(folder)
        assert len(scheme.rules) <= 6
        assert all(any(rule.matches(name) for rule in scheme.rules) for name in names)


def quantise(tensors):
    """As ModelOpt exports FP8, but stated nowhere."""
    weight = tensors[PROJECTION]
    scale = weight.abs().max() / 448
    tensors[PROJECTION] = (weight / scale).to(torch.float8_e4m3fn)
    tensors[PROJECTION + "_scale"] = scale


def test_scales_that_nothing_states_are_refused_on_a_warm_start(llama):
    load(llama)
    edit(llama, quantise)
    with pytest.raises(UserError, match=r"model\.safetensors: .*up_proj\.weight_scale', which is named"):
        load(llama)
    edit(llama, lambda t: t.pop(PROJECTION + "_scale"))
    with pytest.raises(UserError, match=r"up_proj\.weight' in F8_E4M3 \(nothing states that\); dequantise"):
        load(llama)
    edit(llama, lambda t: t.update({PROJECTION: t[PROJECTION].float()}))
    with pytest.raises(UserError, match=r"up_proj\.weight' cannot be right: its values are about \d+ in size"):
        load(llama)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int8", "uint8", "int32", "int16", "int64", "bool"])
def test_a_weight_that_is_stored_as_no_floating_point_number_is_refused(dtype, llama):
    edit(llama, lambda t: t.update({PROJECTION: t[PROJECTION].to(getattr(torch, dtype))}))
    with pytest.raises(UserError, match=r"model\.safetensors: .*up_proj\.weight' in [A-Z0-9_]+ \(nothing .*dequantise"):
        load(llama)


def test_experts_are_looked_at_too(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint("mixtral"), tmp_path / "model")
    name = next(n for n in load_file(path / "model.safetensors") if "experts.3" in n)
    edit(path, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(UserError, match=r"experts\.3.*' in F8_E4M3"):
        load(path)


MODULE = PROJECTION.removesuffix(".weight")
NAMES = ["weight_scale_inv", "weight_scale", "weight_scale_2", "input_scale", "qzeros", "qweight", "scales", "g_idx"]
NAMES += ["weight_packed", "weight_shape", "weight_zero_point", "weight.absmax", "weight.quant_map", "SCB", "k_scale"]
NAMES += ["weight.quant_state.bitsandbytes__nf4", "weight._scale", "down_proj_blocks", "down_proj_scales"]


@pytest.mark.parametrize("name", NAMES)
def test_unmatched_tensors_that_look_like_quantisation_data_are_refused(name, llama):
    edit(llama, lambda t: t.update({f"{MODULE}.{name}": torch.ones(4)}))
    with pytest.raises(UserError, match=rf"{name}', which is named as quantisation data .*dequantise"):
        load(llama)


def test_other_unmatched_tensors_are_left_alone(llama):
    names = ["model.layers.0.self_attn.rotary_emb.inv_freq", "vision_tower.logit_scale", "vision.blocks.0.ls1.gamma"]
    names += ["model.layers.61.eh_proj.weight", "mtp.0.norm.weight", "model.layers.0.self_attn.masked_bias"]
    edit(llama, lambda t: t.update({name: torch.ones(4) for name in names}))
    assert len(load(llama).attends) == 3


DAMAGE = {
    "NaN": (lambda w: w * torch.nan, "not finite"),
    "infinite": (lambda w: w + torch.inf, "not finite"),
    "int8 codes": (lambda w: (w / w.abs().max() * 127).round(), "in size"),
    "int4 codes": (lambda w: (w / w.abs().max() * 7).round(), "multiples of 0.5"),
    "FP8 codes": (lambda w: (w / w.abs().max() * 448).to(torch.float8_e4m3fn).to(w.dtype), "in size"),
}


@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(300, 200), (4, 300, 200)])
def test_values_that_no_model_has_are_found_in_a_sample(name, dtype, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    damage, problem = DAMAGE[name]
    with pytest.raises(UserError, match=rf"'w' cannot be right: .*({problem})"):
        check_values("model", {"norm": torch.ones(200), "w": damage(weight).to(dtype)})
    with pytest.raises(UserError, match=problem):
        check_values("model", {"w": Stack([(weight.flatten(0, -2), damage(weight).flatten(0, -2))])})


PLAUSIBLE = {
    "a bias of hundreds": torch.full((64,), 400.0),
    "zeros": torch.zeros(64, 64),
    "unit rows": torch.eye(64),
    "ternary": torch.randn(64, 64).sign(),
    "learned positions": torch.randn(1024, 64) * 4,
    "an outlier row": torch.cat([torch.full((1, 64), 90.0), torch.randn(640, 64) * 0.02]),
    "integers": torch.arange(9).view(3, 3),
    "nothing": torch.zeros(0, 64),
}


@pytest.mark.parametrize("name", PLAUSIBLE)
def test_values_that_a_model_may_have_are_let_through(name):
    weight = PLAUSIBLE[name]
    check_values("model", {"w": weight, **({"stack": Stack([(weight,)])} if weight.ndim > 1 else {})})


def test_weights_of_the_demo_are_far_from_the_bounds():
    tensors = load_file(demo_directory() / "model" / "model.safetensors")
    assert tensors and not any(implausible(w) or implausible(8 * w) for w in tensors.values())
