"""Programs lose their in-place operators without another trace, and compute what they computed."""

from __future__ import annotations

import pytest
import torch
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram, export

from hpcdecode.model.frontend.functional import functional


class Calls(torch.nn.Module):
    """A function of x as a module, which torch.export takes."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def filled_in_parts(x):
    made = x.new_empty(x.shape[0], 6)
    made[..., :4] = x
    made[..., 4:] = x[:, :2] * 2
    return made * 3


def filled_whole(x):
    made = x.new_empty(x.shape[0], 4)
    made[..., :4].copy_(x)
    made[..., 4:].copy_(x[:, :0])
    return made * 3


def read_between(x):
    made = x.new_empty(x.shape[0], 4)
    made[..., :2] = x[:, 2:]
    first = made[..., :2] + 1
    made[..., 2:] = x[:, :2]
    return torch.cat([first, made], 1)


def part_taken_before(x):
    made = x.new_zeros(x.shape[0], 4)
    late = made[..., 2:]
    made[..., 1:3] = x[:, :2]
    late[:] = x[:, 2:]
    return made + 1


def written_while_viewed(x):
    made = x.exp()
    view = made.reshape(-1)
    made /= 2
    return view + 1


def written_while_transposed(x):
    made = x.exp()
    turned = made.t()
    made.div_(x.sum(1, keepdim=True))
    return turned.sum(0)


def written_in_another_dtype(x):
    made = torch.ones_like(x, dtype=torch.float32)
    made /= x.double() + 3
    return made


def chosen(x):
    values, indices = x.softmax(1).topk(2, 1)
    before = values + 1
    values /= values.sum(1, keepdim=True)
    mask = torch.zeros_like(x).scatter_(1, indices, 1)
    return torch.cat([before, values, mask], 1)


def channels_last(x):
    return x.reshape(1, -1, 2, 2).contiguous(memory_format=torch.channels_last).sum(1)


SIMPLE = {
    "casts": lambda x: x.to(torch.float32) + x.to(torch.float64).to(torch.float32),
    "reshapes": lambda x: x.t().reshape(2, -1) @ x.reshape(-1, 2) + x.t().reshape(4, -1)[:2, :2].sum(),
    "dropout": lambda x: torch.nn.functional.dropout(x, 0.5, training=False) + 1,
    "chunks": lambda x: torch.cat([part * i for i, part in enumerate(x.chunk(3, -1))], -1),
    "chosen": chosen,
    "filled_in_parts": filled_in_parts,
    "filled_whole": filled_whole,
    "flattened": lambda x: x.t().flatten() * 2 + x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).flatten(),
    "unflattened": lambda x: x.t().unflatten(0, (2, -1)).flatten(1, 2) + x.t().contiguous().sum(),
    "contiguous": lambda x: x.contiguous() + x.t().contiguous().t(),
}
OTHERS = (
    channels_last,
    read_between,
    part_taken_before,
    written_while_viewed,
    written_while_transposed,
    written_in_another_dtype,
)


def checked(monkeypatch, function, simple):
    """Compare `function` with its program, for other numbers of rows than it was exported for."""
    ran, run = [], ExportedProgram.run_decompositions
    program = export(Calls(function), (torch.rand(6, 4) + 1,), dynamic_shapes=({0: Dim("T") * 2},), strict=False)
    monkeypatch.setattr(ExportedProgram, "run_decompositions", lambda *given: ran.append(1) or run(*given))
    made = functional(program)
    assert bool(ran) != simple
    targets = [n.target for n in made.graph.nodes if isinstance(n.target, OpOverload)]
    assert targets and not any(target._schema.is_mutable for target in targets)
    for rows in (2, 6, 10):
        x = torch.rand(rows, 4, generator=torch.manual_seed(rows)) + 1
        given, kept = x.clone(), made.module()(x)
        assert torch.equal(kept, function(x)) and torch.equal(x, given)


@pytest.mark.parametrize("name", SIMPLE)
def test_the_usual_operators_need_no_second_trace(monkeypatch, name):
    checked(monkeypatch, SIMPLE[name], simple=True)


@pytest.mark.parametrize("function", OTHERS)
def test_other_writes_are_left_to_torch(monkeypatch, function):
    checked(monkeypatch, function, simple=False)
