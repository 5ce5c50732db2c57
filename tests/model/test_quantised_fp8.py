"""FP8 checkpoints: by blocks (DeepSeek-V3, Qwen3), by tensor and by channel, and with experts in FP4 (DeepSeek-V4)."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV32Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from hpcdecode.config import EngineOptions
from hpcdecode.engine.weight_facts import weight_facts
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.model.run.weight_size import weight_bytes
from hpcdecode.system.threads import fill_rows, on_threads
from tests.support.models import LATENT, save
from tests.support.quantised import PROJECTIONS, check, edit, kept, logits, pair, state, write
from tests.support.tiny import tiny

BLOCK = (48, 24)  # divides no size of the models: the last blocks are ragged
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
BLOCKS = {**FP8, "weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"]}
EXPERTS = re.compile(r".*experts\.(gate_up|down)_proj")
UP = "model.layers.1.mlp.up_proj.weight"


def blocks_of(scales, shape, block=BLOCK):
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]


def by_blocks(stem, weight, kind=torch.float32):
    """As DeepSeek-V3's inference code: scale = max |w| / 448 of a block, which multiplies when it is read."""
    rows, columns = (-(-n // b) for n, b in zip(weight.shape, BLOCK, strict=True))
    padded = torch.zeros(rows * BLOCK[0], columns * BLOCK[1])
    padded[: weight.shape[0], : weight.shape[1]] = weight
    most = padded.view(rows, BLOCK[0], columns, BLOCK[1]).abs().amax((1, 3))
    scales = (most / 448).to(kind)
    if kind == torch.float8_e8m0fnu:
        scales = torch.exp2(torch.ceil(torch.log2(most / 448))).to(kind)
    wide = blocks_of(scales.float(), weight.shape)
    codes = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}, codes.float() * wide


@pytest.mark.parametrize("name", ["llama2", "qwen3_moe", "deepseek_v3"])
def test_blocks(name, checkpoint, tmp_path):
    check(pair(checkpoint(name), tmp_path, by_blocks, BLOCKS))


def test_blocks_of_indexers(tmp_path):
    """The checkpoint of a DeepSeek-V3.2 has scales of the weights of its indexers."""
    indexers = {"index_topk": 64, "index_n_heads": 4, "index_head_dim": 16}
    source = save(DeepseekV32Config(**LATENT, **indexers, n_group=2, topk_group=1), tmp_path / "source")
    chosen = re.compile(rf"{PROJECTIONS.pattern}|.*indexer\.(wq_b|wk)\.weight")
    check(pair(source, tmp_path, by_blocks, BLOCKS, chosen))


def test_its_size_is_that_of_its_weights_in_the_dtype_of_the_job(checkpoint, tmp_path):
    """Ranks choose their layout by it before they load anything."""
    made = pair(checkpoint("llama2"), tmp_path, by_blocks, BLOCKS)
    plain = sum(tensor.nbytes for tensor in load_file(checkpoint("llama2") / "model.safetensors").values())
    assert weight_bytes(made.quantised, torch.float32) == plain
    assert weight_bytes(made.quantised, torch.bfloat16) == plain // 2
    assert weight_facts(EngineOptions(model=str(made.quantised), dtype="bfloat16")).bytes == plain // 2
    (made.quantised / "model.safetensors").unlink()
    assert weight_facts(EngineOptions(model=str(made.quantised))).bytes == 0


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float8_e8m0fnu])
def test_scales_of_blocks_in_other_dtypes(kind, checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, lambda stem, weight: by_blocks(stem, weight, kind), BLOCKS)
    check(made)
    if kind == torch.float8_e8m0fnu:  # or in bytes
        scales = {
            k: v.view(torch.uint8) for k, v in load_file(made.quantised / "model.safetensors").items() if "inv" in k
        }
        edit(made.quantised, lambda t: t.update(scales))
        with pytest.raises(UserError, match=r"expected scales in BF16 or .*, got U8"):
            load_split(made.quantised, dtype="float32")
        config = json.loads((made.quantised / "config.json").read_text())
        config["quantization_config"]["scale_fmt"] = "ue8m0"
        (made.quantised / "config.json").write_text(json.dumps(config))
        check(made)


def test_whole_blocks_are_as_transformers_reads_them(checkpoint, tmp_path):
    tool = Fp8Dequantize(None)
    block = (16, 32)

    def quantise(stem, weight):
        most = weight.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).abs().amax((1, 3))
        codes = (weight / blocks_of(most / 448, weight.shape, block)).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": most / 448}, tool._dequantize_one(codes, most / 448)

    check(pair(checkpoint("llama2"), tmp_path, quantise, {**FP8, "weight_block_size": list(block)}))


def test_blocks_of_stacked_experts(checkpoint, tmp_path):
    """As transformers saves them."""

    def quantise(stem, weight):
        tensors, values = zip(*(by_blocks(stem, w) for w in weight), strict=True)
        codes, scales = (torch.stack([t[k] for t in tensors]) for k in ("weight", "weight_scale_inv"))
        return {"": codes, "_scale_inv": scales}, torch.stack(values)

    check(pair(checkpoint("gpt_oss"), tmp_path, quantise, BLOCKS, EXPERTS))


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dims", [None, 1, (1, True)])
def test_one_scale_a_tensor_or_a_channel(scale, dims, checkpoint, tmp_path):
    def quantise(stem, weight):
        most = weight.abs().max() if dims is None else weight.abs().amax(1, keepdim=True)
        codes = (weight / most * 448).to(torch.float8_e4m3fn)
        values = codes.float() * (most / 448)
        stored = most.squeeze() if dims == 1 else most
        return {"weight": codes, scale: stored / 448, "input_scale": torch.tensor(1.0)}, values

    check(pair(checkpoint("llama3"), tmp_path, quantise, FP8))


def test_fbgemm(checkpoint, tmp_path):
    def quantise(stem, weight):
        most = weight.abs().amax(1, keepdim=True)
        codes = (weight / most * 448).to(torch.float8_e4m3fn)
        return {
            "weight": codes,
            "weight_scale": most / 448,
            "input_scale_ub": torch.tensor([1200.0]),
        }, codes.float() * (most / 448)

    check(pair(checkpoint("llama2"), tmp_path, quantise, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}))


def test_weights_are_rounded_to_the_jobs_dtype(checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, by_blocks, BLOCKS)
    assert torch.equal(logits(made.quantised, "bfloat16"), logits(made.plain, "bfloat16"))


def test_experts_in_fp8_blocks_stay_so(checkpoint, tmp_path):
    """Blocks of 128 columns: a tensor for every expert."""

    def quantise(stem, weight):
        most = weight.abs().amax(1, keepdim=True)
        codes = (weight / most * 448).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": most / 448}, codes.float() * (most / 448)

    chosen = re.compile(r"model\.layers\.\d+\.mlp\.experts\..*proj\.weight")
    made = pair(checkpoint("qwen3_moe"), tmp_path, quantise, FP8, chosen)
    assert kept(made.quantised, "float32") == {"f8", None}


FAULTS = {
    "no scale": (
        lambda t: t.pop(f"{UP}_scale_inv"),
        r"up_proj\.weight' .*expected a tensor .*_scale_inv' or .*, got none",
    ),
    "two scales": (lambda t: t.update({f"{UP}_scale": torch.ones(1)}), r"up_proj\.weight' .*got both"),
    "shape": (
        lambda t: t.update({f"{UP}_scale_inv": torch.ones(3, 2)}),
        r"up_proj\.weight' \(FP8 in blocks of 48 x 24\): expected scales of shape \[3, 3\], got \[3, 2\]",
    ),
    "dtype": (
        lambda t: t.update({f"{UP}_scale_inv": torch.ones(3, 3).int()}),
        "expected scales in BF16 or .*, got I32",
    ),
    "not finite": (lambda t: t[f"{UP}_scale_inv"].fill_(torch.nan), "expected scales that are finite"),
    "a scale too many": (
        lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(11, 3)}),
        r"lm_head\.weight_scale_inv', which is named as quantisation data \(config\.json states fp8 only\)",
    ),
    "plain, but with scales": (
        lambda t: t.update({UP: t[UP].float()}),
        r"up_proj\.weight_scale_inv', which is named as quantisation data",
    ),
    "other codes": (lambda t: t.update({UP: t[UP].view(torch.int8)}), r"up_proj\.weight_scale_inv', which is named"),
    "E5M2": (lambda t: t.update({UP: t[UP].view(torch.float8_e5m2)}), r"up_proj\.weight_scale_inv', which is named"),
    "a vector": (lambda t: t.update({UP: t[UP][0]}), r"expected a matrix or a stack of matrices, got the shape \[64\]"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_tensors_that_do_not_fit_are_named(name, checkpoint, tmp_path):
    made, (change, message) = pair(checkpoint("llama2"), tmp_path, by_blocks, BLOCKS), FAULTS[name]
    edit(made.quantised, change)
    with pytest.raises(UserError, match=message):
        load_split(made.quantised, dtype="float32")


def test_a_checkpoint_that_is_stated_as_quantised_but_is_not(checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, by_blocks, BLOCKS)
    write(made.quantised, load_file(made.plain / "model.safetensors"))
    check(made)


def test_head_and_embedding_may_be_quantised(checkpoint, tmp_path):
    """The head that is tied to the embedding is computed of the same codes."""
    every = re.compile(r".*(proj|lm_head|embed_tokens)\.weight")
    for name in ("llama2", "llama3"):
        check(pair(checkpoint(name), tmp_path / name, by_blocks, BLOCKS, every))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_compute_the_same_and_are_as_many_afterwards(threads):
    before = torch.get_num_threads()
    found = [0] * 40
    try:
        torch.set_num_threads(threads)
        on_threads(lambda i: found.__setitem__(i, torch.get_num_threads()), range(40))
        assert torch.get_num_threads() == threads and found == [1] * 40
        with pytest.raises(ZeroDivisionError):
            on_threads(lambda i: 1 // (i - 7), range(40))
        assert torch.get_num_threads() == threads
        with torch.inference_mode():  # whose tensors others must not write to
            assert torch.equal(fill_rows(torch.empty(9), 2, lambda a, b: torch.arange(a, b).float()), torch.arange(9.0))
    finally:
        torch.set_num_threads(before)


def fp4_experts(stem, weight):
    """Two numbers a byte, the lower half first, and a power of two for 32 of a row."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = weight.unflatten(1, (-1, 32))
    scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1) / 6))).to(torch.float8_e8m0fnu)
    scaled = blocks / scales.float()[..., None]
    number = (scaled.abs()[..., None] - table).abs().argmin(-1)
    codes = (number + 8 * (scaled < 0)).flatten(1).to(torch.uint8)
    signed = torch.cat([table, -table])[codes.long()].unflatten(1, (-1, 32))
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).view(torch.int8)
    return {"weight": packed, "scale": scales}, (signed * scales.float()[..., None]).flatten(1)


def as_released(path):
    """Give tensors the names that DeepSeek-V4 was released with, and add a layer that predicts a token more."""
    names = {re.compile(r"^model\."): "", re.compile(r"^embed_tokens"): "embed", re.compile(r"^hc_head\.hc"): "hc_head"}
    names[re.compile(r"attn\.norm\.")] = "attn.kv_norm."

    def change(tensors):
        for key in list(tensors):
            new = key
            for pattern, name in names.items():
                new = pattern.sub(name, new)
            tensors[new] = tensors.pop(key)
            if new.endswith("tid2eid"):
                tensors[new] = tensors[new].to(torch.int32)
        tensors |= {k.replace("layers.0", "mtp.0"): v.clone() for k, v in tensors.items() if "layers.0." in k}

    edit(path, change)


@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.full)])
def test_deepseek_v4_has_experts_in_fp4(inside, tmp_path):
    """Scales are named `scale`; config.json states the type of experts beside the quantisation, or later in it."""
    source = save(tiny("deepseek_v4"), tmp_path / "source")
    experts = re.compile(r".*experts\.\d+\.w\d\.weight")
    chosen = re.compile(
        rf"{experts.pattern}|.*attn\.w\w+\.weight|.*indexer\.wq_b\.weight|.*shared_experts\.w\d\.weight"
    )

    def quantise(stem, weight):
        if experts.fullmatch(stem + "weight"):
            return fp4_experts(stem, weight)
        stored, plain_weight = by_blocks(stem, weight, torch.float8_e8m0fnu)
        return {"weight": stored["weight"], "scale": stored["weight_scale_inv"]}, plain_weight

    stated = {**BLOCKS, "scale_fmt": "ue8m0", **({"expert_dtype": "fp4"} if inside else {})}
    made = pair(source, tmp_path, quantise, stated, chosen)
    if not inside:
        state(made.quantised, "fp4", "expert_dtype")
    as_released(made.quantised)
    as_released(made.plain)
    check(made)
    assert kept(made.quantised, "bfloat16") == {"mx4", None}


def test_experts_in_another_type_are_refused(checkpoint, tmp_path):
    made = pair(checkpoint("llama2"), tmp_path, by_blocks, {**BLOCKS, "expert_dtype": "fp6"})
    with pytest.raises(UserError, match="expected expert_dtype to be one of 'fp8', 'fp4', got 'fp6'"):
        load_split(made.quantised, dtype="float32")
