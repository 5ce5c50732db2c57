"""Sums in profiles: which numbers of members are measured, and what a member's cost is with them."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape
from hpcdecode.errors import UserError
from hpcdecode.planning.cluster import by_profile
from hpcdecode.planning.group_shape import ONE
from hpcdecode.planning.hardware import LinkSpeed
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.profile import Profile
from hpcdecode.planning.sum_probe import member_counts
from hpcdecode.ranks.wishes import GroupShape
from tests.support.profiles import ALONE, SPLIT, profile, with_sums, write

SIZE = ModelSize.alike(5, 1_000_000, 100_000, 1024, 512, 512)
NETWORK = LinkSpeed(1e9, 1e-5)


def test_members_divide_ranks_and_heads():
    eight, four, three = (LayerShape(heads, 64, 64, 2 * heads, 1.0) for heads in (8, 4, 3))
    assert member_counts(8, [eight, eight]) == [2, 4, 8] and member_counts(8, [eight, four]) == [2, 4]
    assert member_counts(6, [three]) == [3] and member_counts(5, [eight]) == [] and member_counts(1, [eight]) == []
    latent, state = LayerShape(1, 96, 64, 16, 1.0, latent=True), RecurrentShape(8, 4, 16, 16)
    assert member_counts(6, [latent]) == [2] and member_counts(8, [eight, state]) == [2, 4]
    assert member_counts(8, [replace(state, k_heads=1)]) == [2, 4, 8]


def test_a_member_has_its_share_and_two_sums_a_layer():
    found = with_sums(profile(4), 1e-4, 2)
    assert found.tensor_parallel == [1, 2] and found.of_member(found.cost, 1) == SPLIT
    two = found.of_member(found.cost, 2)
    assert two.body_seconds(512) == pytest.approx(SPLIT.body_seconds(512) / 2)
    assert two.attend_seconds_per_cached_token == SPLIT.attend_seconds_per_cached_token / 2
    assert two.sum_latency_seconds == 1e-4 and two.sum_seconds_per_token == pytest.approx(2 * 5 * 1e-9)
    alone = found.of_member(ALONE, 2)
    assert alone.shared_core_fraction == 1 and alone.message_latency_seconds == 0


def test_groups_of_a_profile():
    found = with_sums(profile(4), 1e-4, 2)
    memory = int(1000 * SIZE.kv_bytes_per_token("float32"))
    one, two = (by_profile(found, 4, memory, SIZE, NETWORK, shape) for shape in (ONE, GroupShape(2, 1)))
    assert one.r.capacity == 1000 and two.r.capacity == 2000  # an R-rank has half of each token
    assert [layout.name for layout in two.layouts("replicas")] == ["2 replicas of 2 ranks"]
    assert "2 S + 2 R, groups of 2 ranks" in {layout.name for layout in two.layouts("split")}
    for shape in (GroupShape(4, 1), GroupShape(2, 2)):
        with pytest.raises(UserError, match="expected one stage and one of --tp 1, 2, whose sums the profile has"):
            by_profile(found, 4, 1000, SIZE, NETWORK, shape)


def test_profiles_keep_their_sums(tmp_path):
    from hpcdecode.planning.profile import read

    found = with_sums(profile(4), 1e-4, 2, 4)
    assert read(write(tmp_path / "p.json", found)) == found and isinstance(found, Profile)
    assert read(write(tmp_path / "old.json", profile(4))).sums == []
