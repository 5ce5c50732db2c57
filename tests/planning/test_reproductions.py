"""The figures of docs/reproductions.md: what is exact, what is published where it comes out, and what is said to come
out elsewhere, within 5 %."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.hardware import COMPUTE_EFFICIENCY, device

FIGURES = Path(__file__).parents[2] / "jobs" / "figures"


@pytest.fixture
def figure(monkeypatch):
    monkeypatch.syspath_prepend(str(FIGURES))
    return importlib.import_module


def test_the_loads_of_fastdecode(figure, tmp_path):
    fastdecode = figure("fastdecode")
    found = fastdecode.loads()
    batch, steps, period = fastdecode.BATCH, fastdecode.STEPS, fastdecode.PERIOD
    level = batch + batch * (steps + period) // 2
    assert found["fixed-f"].peak_load == fastdecode.level(batch, steps, period) == level
    assert found["static"].peak_load == batch * (1 + steps)
    assert 0.99 * level < found["load-control, mixed"].peak_load <= level < found["fixed-f, mixed"].peak_load
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = fastdecode.draw(pyplot, found, {"llama-7b": {128: 3.8, 256: 6.2}})
    drawn.savefig(tmp_path / "loads.png")
    assert (tmp_path / "loads.png").read_bytes().startswith(b"\x89PNG")


def test_the_speed_of_fastdecode_over_a_paged_cache(figure):
    ratio = figure("fastdecode").ratios(("opt-175b",), (128, 512))["opt-175b"]
    assert ratio[128] == pytest.approx(1.21, rel=0.05)
    assert ratio[512] == pytest.approx(3.41, rel=0.05)
    assert 1.88 <= ratio[512] <= 5.04


def test_the_wire_of_lamina(figure):
    """Against what the simulator's cost sends while the S device computes."""
    lamina = figure("lamina")
    s = device("h100")
    for name in lamina.MODELS:
        size = lamina.SHAPES[name]
        cost = of_devices(size, s, s, 1.0, 0.0)  # a byte per second
        for batch in lamina.BATCHES:
            assert lamina.least_link(size, s, batch) == pytest.approx(
                batch * cost.wire_seconds_per_token / cost.body_seconds(batch)
            )
    full = lamina.SHAPES["llama-65b"]
    assert lamina.mfu(full, s, 512) == pytest.approx(COMPUTE_EFFICIENCY)
    assert lamina.least_link(full, s, 512) == pytest.approx(28.0e9, rel=0.05)


def test_the_tokens_per_dollar_of_lamina(figure):
    alone, split, same = figure("lamina").gains(("llama-33b",))["llama-33b"]
    assert split.per_dollar / alone.per_dollar == pytest.approx(1.40, rel=0.05)
    assert split.per_dollar / same.per_dollar == pytest.approx(9.93, rel=0.05)


def test_the_schedules_of_fluidinfer(figure):
    found = figure("fluidinfer").compare("opt-6.7b", "rtx4090", rows=600)
    over = {schedule: speed / found.speed["vllm"] for schedule, speed in found.speed.items()}
    assert over["fluid"] == pytest.approx(1.10, rel=0.05) and over["orca"] == pytest.approx(0.55, rel=0.05)
    assert over["mlfq"] < 1 < over["fluid"]
    latency = {schedule: seconds / found.latency["vllm"] for schedule, seconds in found.latency.items()}
    assert latency["fluid"] == pytest.approx(0.94, rel=0.05) and latency["orca"] > 5


def test_a_figure_is_one_command(tmp_path):
    pytest.importorskip("matplotlib")
    command = [sys.executable, str(FIGURES / "lamina.py"), "-o", "lamina.png"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "lamina.png").read_bytes().startswith(b"\x89PNG") and "llama-65b" in result.stdout
