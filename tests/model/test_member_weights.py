"""A member reads its own part of a checkpoint, and what it binds of that runs as slices on the CPU."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from hpcdecode.errors import UserError
from hpcdecode.model import SplitModel, load_split
from hpcdecode.model.frontend.cache import cached_trace
from hpcdecode.model.frontend.checkpoint import Stack, mapped_ranges, open_checkpoint
from hpcdecode.model.frontend.membership import WeightCut, WeightPart
from hpcdecode.model.frontend.operators import MEMBER_SUM
from hpcdecode.model.frontend.plausible import pieces_of
from hpcdecode.model.frontend.shard import member_trace
from hpcdecode.model.frontend.split import split
from hpcdecode.model.frontend.weights import Weights, cut_stack, weight_key
from hpcdecode.model.run.load import bound_weights
from tests.support.models import Attention, step

CPU = torch.device("cpu")


def test_a_cut_takes_ranges_of_one_dimension():
    weight, cut = torch.arange(24).view(6, 4), WeightCut(0, 6, ((1, 2), (4, 6)))
    assert cut.of(weight).tolist() == weight[[1, 4, 5]].tolist() and cut.kept == 3
    assert cut.whole_shape((3, 4)) == (6, 4)
    assert cut.within(2, 3) == WeightCut(0, 3, ((2, 3),))
    columns = WeightCut(1, 4, ((2, 4),))
    assert columns.of(weight).data_ptr() == weight[:, 2:].data_ptr()  # a view


@pytest.mark.parametrize(
    "cut", [WeightCut(0, 3, ((1, 3),)), WeightCut(1, 10, ((2, 5), (6, 9))), WeightCut(2, 5, ((0, 3),))]
)
def test_a_stack_is_cut_piece_by_piece(cut):
    experts = [[torch.randn(6, 5), torch.randn(4, 5)] for _ in range(3)]
    stack, whole = Stack(tuple(own) for own in experts), torch.stack([torch.cat(own) for own in experts])
    made = cut_stack(stack, cut)
    assert made.shape == cut.of(whole).shape
    assert torch.equal(torch.stack([torch.cat(own) for own in made]), cut.of(whole))


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


def resident_bytes(address: int) -> int:
    """Bytes in memory of the mapping that an address lies in."""
    inside = False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            first = line.split(maxsplit=1)[0]
            if "-" in first and ":" not in first:
                inside = address in range(*(int(end, 16) for end in first.split("-")))
            elif inside and first == "Rss:":
                return int(line.split()[1]) << 10
    raise AssertionError("not mapped")


def test_a_part_of_another_shape_is_refused(checkpoint):
    path = checkpoint("llama2")
    own = member_trace(cached_trace(path, torch.float32), 2, 0)
    node = next(n for n, name in own.weights.items() if name.endswith("gate_proj.weight"))
    own.cuts[node] = own.cuts[node]._replace(size=200)  # as of another config.json
    whole = cached_trace(path, torch.float32)
    with pytest.raises(UserError, match=r"has shape \[128, 64\], config.json asks for \[200, 64\]"):
        bound_weights(path, open_checkpoint(path), whole, own, CPU, None)


class Rendezvous:
    """Adds up what members bring, in their order, for threads that run a member each."""

    __name__, __module__ = "rendezvous", __name__

    def __init__(self, members: int):
        self.own = threading.local()
        self._parts: list[Tensor | None] = [None] * members
        self._barrier = threading.Barrier(members, timeout=60)

    def __call__(self, x: Tensor) -> Tensor:
        self._parts[self.own.member] = x
        self._barrier.wait()
        total = self._parts[0]
        for part in self._parts[1:]:
            total = total + part
        self._barrier.wait()
        return total


def loaded(path, dtype: torch.dtype, members: int, member: int, rendezvous: Rendezvous) -> SplitModel:
    """A member whose sums meet the others in the course of a slice."""
    whole = cached_trace(path, dtype)
    own = member_trace(whole, members, member)
    parts = split(own, CPU)
    for group in parts.groups:
        for node in group.graph.nodes:
            if node.target is MEMBER_SUM:
                node.target = rendezvous
    return SplitModel(parts, CPU, bound_weights(path, open_checkpoint(path), whole, own, CPU, None))


@pytest.mark.parametrize(
    ("name", "dtype", "most"),
    [(name, torch.float32, 1e-5) for name in ("llama3", "gpt2", "gpt_oss", "deepseek_v3", "phi3")]
    + [("qwen2", torch.bfloat16, 0.03)],
)
def test_members_slices_give_the_models_logits(name, dtype, most, checkpoint):
    path, members = checkpoint(name), 2
    rendezvous = Rendezvous(members)
    ids = torch.randint(2, 512, (20,), generator=torch.manual_seed(3)).tolist()

    def logits(model: SplitModel) -> Tensor:
        attention = Attention(model)
        batches = [range(16), range(16, 19), range(19, 20)]
        return torch.cat([step(model, attention, [(0, p, ids[p]) for p in b], list(range(len(b)))) for b in batches])

    def run(member: int) -> Tensor:
        rendezvous.own.member = member
        return logits(models[member])

    expected = logits(load_split(path, dtype=dtype))
    models = [loaded(path, dtype, members, member, rendezvous) for member in range(members)]
    with ThreadPoolExecutor(members) as pool:
        found = torch.cat(list(pool.map(run, range(members))), -1)
    assert (found - expected).abs().max() < most * expected.abs().max()
    assert dtype != torch.float32 or torch.equal(found.argmax(-1), expected.argmax(-1))


def test_load_split_loads_a_member(checkpoint):
    path = checkpoint("llama2")
    whole, own = load_split(path, dtype="float32"), load_split(path, dtype="float32", members=2, member=1)
    assert [s.kv_heads for s in own.attends] == [s.kv_heads // 2 for s in whole.attends]
    assert own.vocab_size == whole.vocab_size // 2 and own.split.trace.membership.member == 1
    held = [sum(p.nbytes for i in range(4) for w in m.weights(i) for p in pieces_of(w)) for m in (whole, own)]
    assert held[1] < 0.7 * held[0]
