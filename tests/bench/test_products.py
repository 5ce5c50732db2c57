"""`hpcdecode bench products` runs to its end, with and without experts."""

from __future__ import annotations

import argparse

import pytest

from hpcdecode.bench import products
from hpcdecode.bench.limits import offers_packed_weights
from hpcdecode.model.lower.few_bits import FORMS

pytestmark = pytest.mark.skipif(not offers_packed_weights(), reason="this CPU has no GEMMs with packed weights")


@pytest.mark.parametrize("more", [[], ["--experts", "4", "2", "64", "96"]])
def test_all_cases_are_measured(more):
    parser = argparse.ArgumentParser()
    products.add_arguments(parser)
    report = products.run(
        parser.parse_args(["--model", "tiny", "--tokens", "3", "--passes", "1", "--threads", "2", *more])
    )
    names = [each["case"] for each in report["cases"]]
    assert len(names) == len(set(names)) and all("3 tokens" in name for name in names)
    for bits in FORMS:
        assert any(f"{bits}, 3 tokens" in name for name in names)
