"""Rows of models whose scores have biases by distance: the same bits in any company; where they run."""

from __future__ import annotations

import numpy as np
import pytest

from hpcdecode.attention.shapes import LayerShape, PositionBias
from hpcdecode.engine.setup import _require_biases
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team
from tests.support.preemption import HastyPlacement
from tests.support.samples import made, rows, run

NAMES = ("inkling2", "bloom")
FIELDS = [
    (70, {"n": 2, "temperature": 0.9, "max_tokens": 8, "logprobs": 1}),
    (33, {"max_tokens": 12, "prompt_logprobs": 2, "logprobs": 0}),
    (90, {"beam_width": 2, "max_tokens": 6}),
    (130, {"temperature": 0.8, "max_tokens": 10, "prompt_logprobs": 1}),
]


@pytest.mark.parametrize("name", NAMES)
def test_a_row_alone_is_the_row_in_company(checkpoint, name):
    """Over lanes, chunks of prompts, samples, beams, and rows that leave and come again."""
    model = load_split(checkpoint(name), dtype="float32")
    alone = {}
    for row in rows(*FIELDS):
        alone |= run(model, [row], batch=4)[0]
    placement = type("Placement", (HastyPlacement,), {"rate": 0.6})
    for options in ({}, {"lanes": 2, "placement": placement, "capacity": 1024}):
        done, worker = run(model, rows(*FIELDS), **options)
        assert made(done) == made(alone), options
    assert sum(s.preemptions for s in worker.schedulers) > 1


@pytest.mark.parametrize("name", NAMES)
def test_prompts_attend_by_torch_as_on_a_gpu(checkpoint, name):
    """Beside R-ranks on CPUs: the same tokens, but where two have almost the same logits."""
    model = load_split(checkpoint(name), dtype="float32")
    fields = [(n, {"max_tokens": 12, "temperature": 0.0, "logprobs": 0}) for n in (33, 130, 70, 300)]
    on_cpus, on_gpu = (run(model, rows(*fields), by_torch=by_torch)[0] for by_torch in (False, True))
    assert on_cpus.keys() == on_gpu.keys()
    for key, sequence in on_cpus.items():
        assert on_gpu[key].generated == sequence.generated
        np.testing.assert_allclose(on_gpu[key].logprobs.chosen, sequence.logprobs.chosen, atol=1e-4)


def test_what_crosses_links_is_described(checkpoint):
    model = load_split(checkpoint("inkling2"), dtype="float32", weights=False)
    slices = model.describe()["slices"]
    for shape, part in zip(model.attends, slices, strict=False):
        if isinstance(shape, LayerShape):
            row = sum(t["bytes_per_token"] for t in part["wire"])
            assert row == 4 * (shape.row_columns + shape.out_columns)
    wire = {t["name"]: t["shape"][1:] for t in slices[1]["wire"]}
    assert (wire["biases"], wire["sinks"]) == ([4, 4], [4, 1])


@pytest.mark.parametrize(
    "shape", [LayerShape(2, 8, 8, 4, 0.3, bias=PositionBias(2, 0)), LayerShape(2, 8, 8, 4, 0.3, row_sinks=True)]
)
def test_r_ranks_on_gpus_are_refused(shape):
    ranks = [Rank(rank=i, host="a", cpus=[0], role=role) for i, role in enumerate("SRR")]
    _require_biases(Team(None, ranks), [shape])
    ranks[2].kv_device = "cuda:1"
    _require_biases(Team(None, ranks), [LayerShape(2, 8, 8, 4, 0.3)])
    with pytest.raises(UserError, match=r"--r-device cpu\), got one on cuda:1"):
        _require_biases(Team(None, ranks), [shape])
