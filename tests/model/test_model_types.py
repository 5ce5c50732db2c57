"""Model types that need something that no architecture of the other tests needs: logits equal those of transformers."""

from __future__ import annotations

import pytest

from hpcdecode.model import load_split
from tests.support.tiny import tiny
from tests.support.whole_models import logits_difference, save_whole

QUICK = ("phimoe",)  # a constant that is made on a device
FULL = ("hy_v4", "mistral_large4", "axk2", "dots3_note_text")  # indexers, in models of other families


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(n, marks=pytest.mark.full) for n in FULL)])
def test_logits_equal_those_of_transformers(name, tmp_path):
    whole = save_whole(tiny(name), tmp_path)
    assert logits_difference(load_split(tmp_path, dtype="float32"), whole) < 1e-4
