"""Models whose scores have biases by distance: what crosses links (rows: test_chosen_tokens.py)."""

from __future__ import annotations

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.model import load_split


def test_what_crosses_links_is_described(checkpoint):
    model = load_split(checkpoint("inkling2"), dtype="float32", weights=False)
    slices = model.describe()["slices"]
    for shape, part in zip(model.attends, slices, strict=False):
        if isinstance(shape, LayerShape):
            row = sum(t["bytes_per_token"] for t in part["wire"])
            assert row == 4 * (shape.row_columns + shape.out_columns)
    wire = {t["name"]: t["shape"][1:] for t in slices[1]["wire"]}
    assert (wire["biases"], wire["sinks"]) == ([4, 4], [4, 1])
