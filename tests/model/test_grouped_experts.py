"""Experts on a device: grouped GEMMs over sorted rows, which read nothing back; shown on CPU and fake tensors."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from hpcdecode import LLM, SamplingParams
from hpcdecode.model import load_split
from hpcdecode.model.frontend.cache import cached_trace
from hpcdecode.model.frontend.experts import expert_linear
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.split import split
from hpcdecode.model.frontend.stack import Stack
from hpcdecode.model.lower import expert_blocks, grouped_products
from hpcdecode.model.lower.compile import compile_merged, copied
from hpcdecode.model.lower.group_experts import group_experts
from hpcdecode.model.lower.grouped_products import (
    EXPERT_ORDER,
    EXPERT_PRODUCT,
    ROWS_BY_TOKEN,
    expert_order,
    expert_product,
    rows_by_token,
)
from hpcdecode.model.lower.weight_graph import WeightGraph
from hpcdecode.model.run import bound_slice
from hpcdecode.model.run.load import ModelPart
from tests.support.expert_cases import NEAR, Case, inputs_of, numbers
from tests.support.graphs import example
from tests.support.members import members_logits
from tests.support.parity import make_case
from tests.support.steps import Attention, step

pytestmark = pytest.mark.usefixtures("all_cores")

MODELS = ("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")
INSIDE = {EXPERT_ORDER: expert_order, EXPERT_PRODUCT: expert_product, ROWS_BY_TOKEN: rows_by_token}
TOKENS = [(row, place, (17 * place + row) % 500 + 2) for row in range(3) for place in range(7)]
READ_BACK = (DataDependentOutputException, DynamicOutputShapeException)


@pytest.fixture(params=[False, True], ids=["blocks", "grouped_mm"])
def grouped_mm(request, monkeypatch):
    """Whether torch's grouped_mm multiplies; its form for CPUs takes the same tensors."""
    monkeypatch.setattr(grouped_products, "takes_grouped_mm", lambda *_: request.param)
    return request.param


@pytest.fixture
def as_on_device(monkeypatch):
    """Slices are compiled as they are for a device other than the CPU."""
    monkeypatch.setattr(bound_slice, "compile_graph", lambda graph, *_, **__: compile_merged(graph))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_multiplied_by_the_weights_of_their_own_experts(grouped_mm, dtype):
    cases = [Case(dtype, 8), Case(dtype, 8, transposed=True, biased=True)]
    cases += [Case(dtype, 8, first, 3, biased=first > 0) for first in (0, 3, 5)]  # members' own experts
    for case in cases:
        for tokens, choices, most in ((1, 2, None), (200, 2, 3), (33, 8, None), (0, 2, None)):
            expert = case.chosen(tokens, choices, most)
            x = numbers(dtype, tokens, 1, 48, seed=3)
            found, wanted = case.grouped(x, expert), case.plain(x.double(), expert)
            assert found.shape == wanted.shape and found.dtype == dtype
            assert tokens == 0 or (found - wanted).abs().max() <= NEAR[dtype] * max(1, wanted.abs().max())
            others = (expert < case.first) | (expert >= case.first + case.own)
            assert not found[others].any()
            of_choices = x.expand(tokens, choices, 48).contiguous()
            assert torch.equal(case.grouped(of_choices, expert), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_alone_and_in_any_company(dtype):
    case = Case(dtype, 8, biased=True)
    x, expert = numbers(dtype, 300, 1, 48, seed=3), case.chosen(300, 2)
    together = case.grouped(x, expert)
    assert torch.equal(case.grouped(x.flip(0), expert.flip(0)).flip(0), together)
    for i in range(0, 300, 17):
        assert torch.equal(case.grouped(x[i : i + 1], expert[i : i + 1])[0], together[i])


def test_blocks_have_room_for_any_choice(monkeypatch):
    """The bound on their number is reached where experts have a row more than whole blocks."""
    monkeypatch.setattr(expert_blocks, "BLOCK_ROWS", 4)
    case = Case(torch.float32, 8)
    for tokens in range(1, 24):
        for spread in (1, 2, 5, 8):
            expert = (torch.arange(tokens) % spread)[:, None]
            x = numbers(torch.float32, tokens, 1, 48)
            torch.testing.assert_close(case.grouped(x, expert), case.plain(x, expert))


class Launches(TorchDispatchMode):
    """Counts operators that make numbers, and those whose result has a size that a device must be asked for."""

    def __init__(self):
        super().__init__()
        self.made, self.asked = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        first = out if isinstance(out, Tensor) else out[0]
        fresh = first.untyped_storage().data_ptr() not in given or func._schema.is_mutable
        self.made[func._schema.name] += fresh and "empty" not in func._schema.name
        self.asked[func._schema.name] += torch.Tag.dynamic_output_shape in func.tags
        return out


def launched(call) -> Launches:
    with torch.inference_mode(), Launches() as counted:
        call()
    return counted


def test_a_layer_is_few_launches_whatever_the_experts(grouped_mm):
    x = numbers(torch.float32, 256, 1, 48)
    for experts, choices, before in ((8, 2, 84), (128, 8, 1200)):
        case = Case(torch.float32, experts)
        expert = case.chosen(256, choices)
        was, now = (launched(partial(run, x, expert)) for run in (case.plain, case.grouped))
        assert was.made.total() >= before and was.asked.total() >= 2
        assert now.asked.total() == 0
        assert now.made.total() <= (12 if grouped_mm else 100)


def graph_with_experts(path: Path, dtype: torch.dtype, device: str) -> fx.Graph:
    """The graph of a slice with a layer of experts."""
    graphs = [group.graph for group in split(cached_trace(path, dtype), torch.device(device)).groups]
    return next(g for g in graphs if any(n.target is expert_linear for n in g.nodes))


def fake(about: Meta) -> Tensor:
    return torch.empty([{"T": 11, "L": 4}.get(n, n) for n in about.shape], dtype=about.dtype, device="cuda:0")


def run_fake(graph: fx.Graph) -> None:
    """Run a slice's graph on a GPU that is not there: what reads a number back raises an error."""
    with FakeTensorMode():
        fx.GraphModule({}, graph)(*(fake(n.meta["about"]) for n in graph.nodes if n.op == "placeholder"))


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.bfloat16) for name in MODELS), ("gpt_oss", torch.float32)])
def test_slices_read_nothing_back_from_a_gpu(checkpoint, monkeypatch, name, dtype):
    monkeypatch.setattr(grouped_products, "is_capable", lambda _: True)
    graph = graph_with_experts(checkpoint(name), dtype, "cuda:0")
    with pytest.raises(READ_BACK):
        run_fake(graph)
    made = WeightGraph(copied(graph))
    group_experts(made)
    targets = Counter(n.target for n in made.graph.nodes)
    assert [targets[each] for each in INSIDE] == [1, 2, 1]
    run_fake(made.graph)
    for node in made.graph.nodes:
        node.target = INSIDE.get(node.target, node.target)
    run_fake(made.graph)


def test_grouped_mm_is_taken_where_it_reads_nothing_back(monkeypatch):
    capable = []
    monkeypatch.setattr(grouped_products, "is_capable", lambda _: bool(capable))

    def taken(rows, weight):
        with FakeTensorMode():
            x, w = (torch.empty(shape, dtype=dtype, device="cuda:0") for shape, dtype in (rows, weight))
            return grouped_products.takes_grouped_mm(x, w), grouped_products.takes_grouped_mm(x, w.mT)

    half = torch.bfloat16
    assert taken(((5, 64), half), ((8, 32, 64), half)) == (False, False)
    capable.append(True)
    assert taken(((5, 64), half), ((8, 32, 64), half)) == (True, True)
    assert taken(((5, 64), torch.float32), ((8, 32, 64), torch.float32)) == (False, False)
    assert taken(((5, 60), half), ((8, 32, 60), half)) == (False, False)
    assert taken(((5, 64), half), ((1024, 8, 64), half)) == (False, False)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_torchs_compiler_takes_a_slice_whole(checkpoint, name):
    """Without graph breaks, for any number of tokens; before, experts ended it: GuardOnDataDependentSymNode."""
    graph = graph_with_experts(checkpoint(name), torch.float32, "cpu")
    generator = torch.Generator().manual_seed(2)
    values = [example(n, generator) for n in graph.nodes if n.op == "placeholder"]
    plain = compile_merged(graph)
    values = inputs_of(plain, graph, values)
    compiled = torch.compile(plain.run, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.inference_mode():
        for found, wanted in zip(compiled(*values), plain.run(*values), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_equal_those_of_transformers(tmp_path, as_on_device, name):
    case = make_case(name, tmp_path, rows=5, new_tokens=6)
    rows = [json.loads(line) for line in (case / "prompts.jsonl").read_text().splitlines()]
    llm = LLM(case / "model", dtype="float32", kv_memory="16M", threads=1)
    made = llm.generate(rows, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), use_tqdm=False)
    found = [list(each.outputs[0].token_ids) for each in made]
    assert found == json.loads((case / "reference.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_weights_of_experts_are_one_tensor_and_rows_have_the_same_bits_alone(checkpoint, as_on_device, name):
    model = load_split(checkpoint(name), dtype="bfloat16")
    stretches = [stretch for one in model._slices.values() for stretch in one.stretches]
    of = [(r.form, w) for s in stretches for r, w in zip(s.compiled.recipes, s.weights, strict=True)]
    experts = [weight for form, weight in of if form == "experts"]
    assert experts and all(isinstance(w, Tensor) and w.ndim == 3 and w.is_contiguous() for w in experts)
    assert not any(isinstance(weight, Stack) for _, weight in of)
    together = step(model, Attention(model), TOKENS, list(range(len(TOKENS))))
    for row in range(3):
        own = [token for token in TOKENS if token[0] == row]
        assert torch.equal(step(model, Attention(model), own, list(range(7))), together[7 * row : 7 * row + 7])


def test_a_stack_becomes_one_tensor_an_expert_at_a_time():
    read = []

    def pieces(e: int) -> tuple[Tensor, Tensor]:
        read.append(e)
        return torch.full((2, 4), e), torch.full((1, 4), -e)

    made = Stack.read_later((3, 3, 4), pieces).whole()
    assert read == [0, 1, 2]
    assert torch.equal(made, torch.stack([torch.cat(pieces(e)) for e in range(3)]))


@pytest.mark.parametrize("ep", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_members_have_the_models_logits(checkpoint, as_on_device, name, ep):
    ids = torch.randint(2, 512, (20,), generator=torch.manual_seed(3)).tolist()
    whole = load_split(checkpoint(name), dtype="float32")
    models = [load_split(checkpoint(name), dtype="float32", part=ModelPart(2, member, ep=ep)) for member in range(2)]
    with torch.inference_mode():
        found, wanted = members_logits(models, ids), members_logits([whole], ids)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert torch.equal(found.argmax(-1), wanted.argmax(-1))
