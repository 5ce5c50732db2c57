"""Devices by their data sheets, and curves of T(B)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcdecode.errors import UserError
from hpcdecode.planning.cluster import by_data_sheets
from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.hardware import DEVICES, LAMINA_A100, ROOFLINE, EfficiencyCurve, LinkSpeed, device
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.serving import of_device

SIZE = ModelSize.alike(40, 13_000_000_000, 164_000_000, 5120, 5120, 5120)
NETWORK = LinkSpeed(5e10, 1e-5)


def test_a_curve_is_between_the_longer_of_both_and_their_sum():
    assert ROOFLINE.seconds(7.0, 4.0) == pytest.approx(max(7.0 / 0.7, 4.0 / 0.8))
    assert EfficiencyCurve(0.5, 0.25, 2.0, 0.0, "").seconds(1.5, 1.0) == pytest.approx(5.0)  # 3 and 4
    assert EfficiencyCurve(1.0, 1.0, 1.0, 0.0, "").seconds(1.5, 1.0) == pytest.approx(2.5)
    assert LAMINA_A100.seconds(0.0, 0.0) == 0.0
    assert "tuned" in LAMINA_A100.source


def test_t_of_b_is_by_the_curve_and_attention_is_not():
    own, plain = device("a100-pcie"), replace(device("a100-pcie"), curve=ROOFLINE)
    curve, roofline = (of_devices(SIZE, each, each, 1.0, 0.0) for each in (own, plain))
    for batch in (1, 64, 1024):
        read, products = 2 * 13e9 / 1935e9, 2 * 13e9 * batch / 312e12
        assert curve.body_seconds(batch) == pytest.approx(((products / 0.54) ** 2 + (read / 0.35) ** 2) ** 0.5)
        assert roofline.body_seconds(batch) == pytest.approx(max(products / 0.7, read / 0.8))
    assert curve.attend_seconds_per_cached_token == roofline.attend_seconds_per_cached_token
    assert curve.prefill_seconds_per_pair == roofline.prefill_seconds_per_pair
    half = replace(plain, cache_share=0.4)
    slower = of_devices(SIZE, half, half, 1.0, 0.0)
    assert slower.attend_seconds_per_cached_token == pytest.approx(2 * curve.attend_seconds_per_cached_token)


def test_sums_of_several_devices_take_their_latency():
    two = device("2xa100-pcie")
    without = replace(two, curve=replace(two.curve, sum_seconds=0.0))
    more, less = (of_devices(SIZE, each, each, 1.0, 0.0).body_seconds(64) for each in (two, without))
    assert more - less == pytest.approx(2 * 40 * 80e-6)


def test_hosts_whose_kv_cache_lies_in_another_memory():
    """They have the arithmetic of their sockets, and 0.9 of that memory is room."""
    epyc = device("epyc-9004")
    for name, memory in (("cxl-cz120", 2.048e12), ("cxl-pool", 24e12)):
        host = device(name)
        assert host.is_host and host.flop_per_second == epyc.flop_per_second
        assert host.bytes_per_second < epyc.bytes_per_second and host.memory_bytes == memory
        nodes = by_data_sheets(SIZE, device("h100"), 1, host, 2, NETWORK, "bfloat16", 1 << 30).r
        assert nodes.beside == pytest.approx((0.9 * memory - SIZE.weight_bytes) / SIZE.kv_bytes_per_token(), rel=1e-3)
        with pytest.raises(UserError, match=f"an accelerator with a memory of its own, got {name}"):
            of_device(SIZE, host)
    assert device("xeon-max").bytes_per_second > 5 * device("xeon-gen4").bytes_per_second


def test_every_device_has_a_source_and_figures_that_can_be():
    for name, each in DEVICES.items():
        assert each.name == name and each.source and each.count == 1
        assert 1e11 < each.flop_per_second < 1e16 and 5e10 < each.bytes_per_second < 1e13
        assert 0 < each.cache_share <= 1 and 0 < each.curve.flop_share <= 1 and 0 < each.curve.weight_share <= 1
