"""How fast tiers are taken to be."""

from __future__ import annotations

import pytest

from hpcdecode.engine.swap_room import _rate
from hpcdecode.engine.tier_speed import TierSpeed, speed_here, tier_speed
from hpcdecode.errors import UserError
from hpcdecode.system.swap_tiers import FileTier, HostTier, TierSpec

SIZE = 1 << 20


def test_a_tier_that_is_held_back_is_as_slow_as_it_is_held_back(tmp_path):
    spec = TierSpec("nvme", 8 << 20, str(tmp_path), rate=100 << 20)
    speed = speed_here(spec, SIZE)
    assert 0.5 * spec.rate < speed.least <= max(speed.read_rate, speed.write_rate) < 1.5 * spec.rate
    assert not list(tmp_path.iterdir())


def test_the_lower_rate_counts():
    assert TierSpeed(3.0, 2.0).least == 2.0 and TierSpeed(1.0, 2.0).least == 1.0


def test_a_move_takes_its_share_of_a_chunk_and_what_every_move_takes():
    speed = TierSpeed(1000.0, 500.0, move_seconds=0.25)
    assert [speed.seconds(n, 1000, False) for n in (0, 1000, 400)] == pytest.approx([0.25, 1.0, 0.55])
    assert [speed.seconds(n, 1000, True) for n in (0, 1000, 400)] == pytest.approx([0.25, 2.0, 0.95])
    assert TierSpeed(1e9, 1e9, move_seconds=1.0).seconds(0, 1000, True) == 1e-6  # no more than a chunk


def test_what_a_small_move_takes_is_measured():
    tier = HostTier(4 * SIZE, SIZE)
    speed = tier_speed(tier, SIZE)
    tier.close()
    assert 0 < speed.move_seconds < 0.01 and speed.seconds(SIZE, SIZE, False) == pytest.approx(SIZE / speed.read_rate)


def test_a_tier_that_does_not_work_takes_no_sequences(tmp_path):
    tier = FileTier(str(tmp_path), 4 * SIZE, SIZE)
    assert _rate(tier, SIZE) > 0
    tier.close()
    with pytest.raises(UserError, match="expected a tier that can be written and read, got: Bad file descriptor"):
        tier_speed(tier, SIZE)
    assert _rate(tier, SIZE) == 0.0
    with pytest.raises(UserError, match="expected a directory to write to"):
        speed_here(TierSpec("nvme", SIZE, str(tmp_path / "none")), SIZE)
