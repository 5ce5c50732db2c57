"""`hpcdecode bench attention` measures attention to chosen tokens beside that to all."""

from __future__ import annotations

import pytest

from hpcdecode.attention.sizes import bytes_per_token
from hpcdecode.bench import chosen


@pytest.mark.parametrize("name", ["glm-5", "deepseek-v4-sparse", "deepseek-v4-heavy"])
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
def test_a_measurement_verifies_and_compares(kv_dtype, name):
    found = list(chosen.measure(name, kv_dtype, [130, 70], 1 << 16, 1, 2, topk=100))
    assert [case["unit"] for case in found] == ["tokens/s of one layer"] * 2
    assert all(case["value"] > 0 and case["ratio"] > 0 for case in found)


def test_bytes_of_deepseek_v3_2():
    """Of a token and layer: the latent, and an index key of 128 elements."""
    shape = chosen.MODELS["deepseek-v3.2"]
    assert bytes_per_token([shape], "bfloat16") == 2 * (512 + 64 + 128)
    assert bytes_per_token([shape], "int8") == 512 + 64 + 2 * 2 + 2 * 128
