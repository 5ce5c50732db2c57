"""Matrix products over a few numbers of rows, and the dtype that a checkpoint is run in."""

import json

import pytest
import torch
from torch.nn.functional import linear

from hpcdecode._attn_cpu import supported_isas
from hpcdecode.engine.weight_facts import auto_dtype
from hpcdecode.model.frontend import rows


def test_padded_is_a_few_numbers_at_most_an_eighth_more() -> None:
    counts = range(1, 4097)
    assert all(n <= rows.padded(n) for n in counts)
    assert all(rows.padded(n) <= max(16 * -(-n // 16), n * 9 / 8) for n in counts)
    assert all(rows.padded(rows.padded(n)) == rows.padded(n) for n in counts)
    assert len({rows.padded(n) for n in counts}) == 5 + 7 + 8 * 5


@pytest.mark.parametrize("count", [1, 3, 17, 130])
@pytest.mark.parametrize("layout", ["alone", "with room", "last rows of a larger one", "columns of a larger one"])
def test_products_are_of_the_rows_alone(count: int, layout: str) -> None:
    generator = torch.Generator().manual_seed(count)
    weight, bias = torch.randn(24, 32, generator=generator), torch.randn(24, generator=generator)
    x = {
        "alone": lambda: torch.empty(count, 32),
        "with room": lambda: rows.empty_rows(count, 32, torch.float32),
        "last rows of a larger one": lambda: torch.full((count + 9, 32), torch.nan)[9:],
        "columns of a larger one": lambda: torch.full((count + 200, 50), torch.nan)[:count, 18:],
    }[layout]()
    x.copy_(torch.randn(count, 32, generator=generator))
    torch.testing.assert_close(rows.linear(x, weight, bias), linear(x, weight, bias))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 128)
    result = rows.packed_linear(x[None], packed, bias)
    torch.testing.assert_close(result, linear(x, weight, bias)[None])


@pytest.mark.parametrize("isa", supported_isas())
def test_16_bit_checkpoints_run_in_bfloat16_where_the_cpu_multiplies_it(checkpoint, tmp_path, monkeypatch, isa) -> None:
    monkeypatch.setenv("HPCDECODE_ISA", isa)
    config = json.loads((checkpoint("llama2") / "config.json").read_text())
    for dtype, multiplied in (("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float32", "float32")):
        (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        expected = multiplied if isa in ("avx512_bf16", "amx") else "float32"
        assert auto_dtype(str(tmp_path)) == expected
