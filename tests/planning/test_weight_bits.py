"""Plans of weights in few bits: what they take in memory, by a checkpoint or by --weights, and what a step reads."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from msgspec.structs import replace

from hpcdecode.cli import main
from hpcdecode.model.run.weight_size import weight_bytes
from hpcdecode.planning.cluster import by_data_sheets
from hpcdecode.planning.group_shape import ONE, held_on, member_bytes
from hpcdecode.planning.hardware import LinkSpeed, device
from hpcdecode.planning.model_size import ModelSize, WeightBits
from hpcdecode.planning.serving import of_device
from hpcdecode.planning.weight_bits import weight_bits
from hpcdecode.ranks.wishes import GroupShape
from tests.support.gguf_files import GPT_OSS, GPT_OSS_VALUES, write
from tests.support.models import save

A10, H100, EPYC = device("a10"), device("h100"), device("epyc-9004")
EXPERTS = ModelSize.alike(24, 20_000_000_000, 600_000_000, 4096, 1024, 1024)
EXPERTS = replace(EXPERTS, expert_weights=19_000_000_000, experts=32, experts_per_token=4)
FEW_BITS = replace(EXPERTS, bits=WeightBits(experts=4.25, if_needed=True))
NETWORK = LinkSpeed(5e10, 1e-5)


def test_bits_of_a_checkpoint_are_those_of_its_weights_in_memory(tmp_path):
    source = save(
        transformers.GptOssConfig(**GPT_OSS, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        tmp_path / "source",
    )
    made = write(source, tmp_path, "gpt-oss", lambda own: "MXFP4" if "_exps" in own else "Q8_0", **GPT_OSS_VALUES)
    bits = weight_bits(str(made.file), None)
    assert bits.experts == pytest.approx(4.25, abs=0.5) and bits.head == 16 and 8.5 <= bits.layers < 10
    assert bits.if_needed and weight_bits(str(made.file), "auto") == bits
    assert weight_bits(str(made.file), "bfloat16") == WeightBits()
    size = replace(ModelSize.from_directory(str(made.file)), bits=bits)
    in_files = weight_bytes(made.file, torch.bfloat16, "auto")  # with the embedding
    assert size.weight_bytes == pytest.approx(in_files, rel=0.02)


@pytest.mark.parametrize("weights", ["int4", "mxfp4", "fp8", "int8"])
def test_bits_that_weights_are_rounded_to(checkpoint, tmp_path, weights):
    """With the checkpoint, and with its config.json alone."""
    held = weight_bits(str(checkpoint("qwen3_moe")), weights)
    shutil.copy(checkpoint("qwen3_moe") / "config.json", tmp_path)
    stated = weight_bits(str(tmp_path), weights)
    assert stated.layers == stated.experts == held.experts < held.layers < 10  # norms are in bfloat16
    assert held.head == stated.head == 16 and not held.if_needed and not stated.if_needed


def test_a_plan_without_weights_says_that_they_count_in_bfloat16(checkpoint, tmp_path, capsys):
    config = json.loads((checkpoint("llama3") / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for more, said in (([], True), (["--weights", "fp8"], False)):
        assert main(["plan", "--model", str(tmp_path), "--rows", "100", *more]) == 0
        printed = capsys.readouterr()
        assert ("give --weights int4, mxfp4, mxfp8 or fp8" in printed.out + printed.err) == said


def test_a_plan_of_an_incomplete_checkpoint_goes_by_its_config(checkpoint, tmp_path, capsys):
    shutil.copy(checkpoint("llama3") / "config.json", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert main(["plan", "--model", str(tmp_path), "--rows", "100", "--weights", "int4"]) == 0
    printed = capsys.readouterr()
    assert "model-00001-of-00002.safetensors" in printed.out + printed.err
    assert weight_bits(str(tmp_path), "int4").layers == 5


def test_steps_read_the_bits_of_the_experts_that_are_touched():
    touched = 1 - (28 / 32) ** 4
    assert FEW_BITS.read_bytes(4) == pytest.approx(2e9 + touched * 19e9 * 4.25 / 8)
    assert FEW_BITS.read_bytes(4, expanded=True) == pytest.approx(2e9 + touched * 19e9 * (4.25 / 8 + 4))
    assert EXPERTS.read_bytes(4, expanded=True) == EXPERTS.read_bytes(4)


def test_a_gpu_holds_few_bits_where_bfloat16_has_no_room():
    assert held_on(FEW_BITS, A10, ONE) == FEW_BITS == held_on(FEW_BITS, EPYC, ONE)
    assert held_on(FEW_BITS, H100, ONE) == EXPERTS == held_on(FEW_BITS, A10, GroupShape(2, 1))
    asked = replace(FEW_BITS, bits=replace(FEW_BITS.bits, if_needed=False))
    assert held_on(asked, H100, ONE) == asked


def test_layouts_hold_what_their_devices_hold():
    def cluster(size, s):
        return by_data_sheets(size, s, 1, EPYC, 2, NETWORK, "bfloat16", 64 << 30)

    assert not cluster(EXPERTS, A10).layouts("split")
    for s, size in ((A10, FEW_BITS), (H100, EXPERTS)):
        for layout in cluster(FEW_BITS, s).layouts("auto"):
            for part in layout.parts:
                own = size if part.r_ranks or part.device == s.name else FEW_BITS
                assert part.weights == (member_bytes(own, ONE), own.weight_bytes)
    assert of_device(FEW_BITS, A10).capacity > 0
    seconds = [cluster(FEW_BITS, s).split_cost.body_seconds(1) for s in (A10, H100)]
    assert seconds[0] > seconds[1]
