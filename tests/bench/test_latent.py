"""`hpcdecode bench attention` measures attention over latents beside that over expanded K and V."""

from __future__ import annotations

import pytest

from hpcdecode.attention.sizes import bytes_per_token
from hpcdecode.bench import latent


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_measurement_verifies_and_compares(kv_dtype):
    found = list(latent.measure("glm-4.7-flash", kv_dtype, (70, 70), 1, 2))
    assert [case["unit"] for case in found] == ["GFLOP/s", "tokens/s of one layer"]
    assert all(case["value"] > 0 and case["ratio"] > 0 for case in found)


def test_bytes_of_deepseek_v3():
    """Of a token and layer in bfloat16, over latents and expanded."""
    model = latent.MODELS["deepseek-v3"]
    assert bytes_per_token([model.latent], "bfloat16") == 2 * (512 + 64)
    assert bytes_per_token([model.latent], "int8") == 512 + 64 + 2 * 2
    assert bytes_per_token([model.expanded], "bfloat16") == 2 * 128 * (192 + 128)
    assert 2 * (model.latent.row_columns + model.latent.out_columns) == 279_680
