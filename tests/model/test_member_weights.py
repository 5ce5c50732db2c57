"""A member reads its own part of a checkpoint, and what it binds of that runs as slices on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model import SplitModel, load_split
from hpcdecode.model.frontend.cache import cached_trace
from hpcdecode.model.frontend.checkpoint import open_checkpoint
from hpcdecode.model.frontend.mapped import mapped_ranges
from hpcdecode.model.frontend.membership import WeightCut, WeightPart
from hpcdecode.model.frontend.shard import member_trace
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.frontend.weights import Weights, cut_pieces, weight_key
from hpcdecode.model.run.checkpoint_weights import bound_weights
from hpcdecode.model.run.load import ModelPart
from tests.support.mappings import resident_bytes
from tests.support.members import members_logits
from tests.support.quantised import Stored, pair

CPU = torch.device("cpu")


def test_a_cut_takes_ranges_of_one_dimension():
    weight, cut = torch.arange(24).view(6, 4), WeightCut(0, 6, ((1, 2), (4, 6)))
    assert cut.of(weight).tolist() == weight[[1, 4, 5]].tolist() and cut.kept == 3
    assert cut.whole_shape((3, 4)) == (6, 4)
    assert cut.within(2, 3) == WeightCut(0, 3, ((2, 3),))
    columns = WeightCut(1, 4, ((2, 4),))
    assert columns.of(weight).data_ptr() == weight[:, 2:].data_ptr()  # a view


@pytest.mark.parametrize("cut", [WeightCut(0, 10, ((2, 5), (6, 9))), WeightCut(1, 5, ((0, 3),))])
def test_a_matrix_is_cut_piece_by_piece(cut):
    pieces = [torch.randn(6, 5), torch.randn(4, 5)]
    assert torch.equal(torch.cat(cut_pieces(pieces, cut)), cut.of(torch.cat(pieces)))


def test_a_stack_is_read_when_it_is_asked_for():
    read = []
    stack = Stack.read_later((3, 2, 4), lambda e: (read.append(e) or torch.full((2, 4), e),), joined=True)
    assert stack.shape == (3, 2, 4) and len(stack) == 3 and not read
    assert [own.unique().tolist() for (own,) in stack[1:]] == [[1], [2]] and read == [1, 2]
    with pytest.raises(IndexError):
        stack[3]
    held = stack.held()
    assert isinstance(held, Tensor) and held[:, 0, 0].tolist() == [0, 1, 2]
    pieces = Stack.read_later((2, 4, 1), lambda e: (torch.full((3, 1), e), torch.full((1, 1), 9))).held()
    assert isinstance(pieces, Stack) and pieces.shape == (2, 4, 1) and pieces[1][1].item() == 9


def weights_of(path, members: int, member: int) -> Weights:
    whole = cached_trace(path, torch.float32)
    return bound_weights(path, open_checkpoint(path), whole, member_trace(whole, members, member), CPU, None)


@pytest.mark.parametrize("name", ["llama3", "mixtral", "gpt_oss", "phi3"])
def test_parts_are_parts_of_the_whole_weights(name, checkpoint):
    path = checkpoint(name)
    whole = weights_of(path, 1, 0)
    for member in range(2):
        for key, weight in weights_of(path, 2, member).items():
            if isinstance(key, WeightPart):
                expected = as_one(whole[key.name])
                assert torch.equal(as_one(weight), key.cut.of(expected)), key
            else:
                assert torch.equal(as_one(weight), as_one(whole[key])), key


def as_one(weight: Tensor | Stack) -> Tensor:
    return weight if isinstance(weight, Tensor) else torch.stack([torch.cat(own) for own in weight])


def test_parts_of_quantised_weights_are_parts_of_what_they_stand_for(checkpoint, tmp_path):
    def quantise(stem: str, weight: Tensor) -> Stored:
        scale = weight.abs().max() / 400
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale_inv": scale.view(1, 1)}, codes.float() * scale

    stated = {"quant_method": "fp8", "weight_block_size": [256, 256]}
    quantised, plain = pair(checkpoint("llama2"), tmp_path, quantise, stated)
    for member in range(2):
        models = [load_split(path, dtype="float32", part=ModelPart(2, member)) for path in (quantised, plain)]
        for bound in zip(*(weights_bound(model) for model in models), strict=True):
            assert torch.equal(*bound)


def weights_bound(model: SplitModel) -> list[Tensor]:
    stretches = [s for i in range(len(model.attends) + 1) for s in model._slices[i].stretches]
    return [as_one(weight) for s in stretches for weight in s.weights]


def test_tied_weights_are_cut_by_their_use(checkpoint):
    path = checkpoint("llama3")  # embedding and head are one tensor of the checkpoint
    own = member_trace(cached_trace(path, torch.float32), 2, 1)
    weights, keys = weights_of(path, 2, 1), [weight_key(own, node) for node in own.weights]
    (head,) = (key for key in keys if isinstance(key, WeightPart) and "lm_head" in key.name)
    embedding = weights["model.embed_tokens.weight"]
    assert torch.equal(weights[head], embedding[256:]) and weights[head].data_ptr() == embedding[256:].data_ptr()


def test_a_member_touches_its_part_of_the_file_alone(tmp_path):
    """Of a weight of 16 MiB, cut by rows, one of four members has a quarter in memory after it has read it all."""
    from safetensors.torch import save_file

    from hpcdecode.model.frontend.meta import Meta
    from hpcdecode.model.frontend.sources import Sources

    save_file({"w": torch.randn(4096, 1024)}, tmp_path / "model.safetensors")
    cut, file = WeightCut(0, 4096, ((1024, 2048),)), str(tmp_path / "model.safetensors")
    about = Meta.of(torch.float32, (1024, 1024))
    weights = Weights(tmp_path, open_checkpoint(tmp_path), Sources({"w": "w"}), {WeightPart("w", cut): about}, CPU)
    part = weights[WeightPart("w", cut)]
    assert isinstance(part, Tensor) and part.sum().isfinite()
    assert any(part.data_ptr() in own for name, own in mapped_ranges() if name == file)
    assert 4 << 20 <= resident_bytes(part.data_ptr()) < 8 << 20  # and some that were read ahead


def test_a_part_of_another_shape_is_refused(checkpoint):
    path = checkpoint("llama2")
    own = member_trace(cached_trace(path, torch.float32), 2, 0)
    node = next(n for n, name in own.weights.items() if name.endswith("gate_proj.weight"))
    own.cuts[node] = own.cuts[node]._replace(size=200)  # as of another config.json
    whole = cached_trace(path, torch.float32)
    with pytest.raises(UserError, match=r"has shape \[128, 64\], config.json asks for \[200, 64\]"):
        bound_weights(path, open_checkpoint(path), whole, own, CPU, None)


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [(name, "float32", 1e-5) for name in ("llama3", "gpt2", "gpt_oss", "deepseek_v3", "phi3", "kimi_linear")]
    + [(name, "float32", 1e-5) for name in ("granitemoehybrid", "jamba", "lfm2_moe")]
    + [("qwen2", "bfloat16", 0.03), ("bamba", "bfloat16", 0.03)],
)
def test_members_slices_give_the_models_logits(name, dtype, most, checkpoint):
    path, ids = checkpoint(name), torch.randint(2, 512, (20,), generator=torch.manual_seed(3)).tolist()
    models = [load_split(path, dtype=dtype, part=ModelPart(2, member)) for member in range(2)]
    whole = load_split(path, dtype=dtype)
    with torch.inference_mode():
        found, expected = members_logits(models, ids), members_logits([whole], ids)
    assert (found - expected).abs().max() < most * expected.abs().max()
    assert dtype != "float32" or torch.equal(found.argmax(-1), expected.argmax(-1))


def test_load_split_loads_a_member(checkpoint):
    path = checkpoint("llama2")
    whole, own = load_split(path, dtype="float32"), load_split(path, dtype="float32", part=ModelPart(2, 1))
    assert [s.kv_heads for s in own.attends] == [s.kv_heads // 2 for s in whole.attends]
    assert own.vocab_size == whole.vocab_size // 2
    assert own.membership is not None and own.membership.member == 1
