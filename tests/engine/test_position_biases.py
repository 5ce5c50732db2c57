"""Models whose scores have biases by distance: what crosses links, and where they run (rows: test_chosen_tokens.py)."""

from __future__ import annotations

import pytest

from hpcdecode.attention.shapes import LayerShape, PositionBias
from hpcdecode.engine.setup import _require_biases
from hpcdecode.errors import UserError
from hpcdecode.model import load_split
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team


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
