"""Profiles that are damaged: each is refused with what is wrong with it, before it says anything."""

from __future__ import annotations

import msgspec
import pytest

from hpcdecode.errors import UserError
from hpcdecode.planning.profile import read
from tests.support.profiles import profile, with_sums

SHAPE = {"type": "attention", "kv_heads": 2, "k_dim": 64, "v_dim": 64, "q_heads": 4, "scale": 0.1}
DAMAGES = {  # place, value, and what is said
    "no number": ("cost.attend", "fast", "Expected `float`, got `str` - at `$.cost.attend`"),
    "null": ("cost.attend", None, "Expected `float`, got `null` - at `$.cost.attend`"),
    "negative": ("cost.attend", -1e-9, "Expected `float` >= 0.0 - at `$.cost.attend`"),
    "negative steps": ("cost.body", [1e-2, -1.0], r"Expected `float` >= 0.0 - at `$.cost.body\[1\]`"),
    "no time": (
        "replica.body",
        [0.0, 1.0],
        "body: expected steps that take time, got one of 0 seconds - at `$.replica`",
    ),
    "one size": ("cost.tokens", [1], "Expected `array` of length >= 2 - at `$.cost.tokens`"),
    "lengths": ("cost.body", [1.0, 2.0, 3.0], "body: expected seconds of 2 sizes, got 3 - at `$.cost`"),
    "order": ("cost.drawn", [512, 1], r"logits: expected seconds of ascending sizes, got \[512, 1\] - at `$.cost`"),
    "pages": ("cost.paged_tokens", [4], "paged_seconds_at: expected seconds of 1 sizes, got 0 - at `$.cost`"),
    "shared": ("cost.shared", 1.5, "Expected `float` <= 1.0 - at `$.cost.shared`"),
    "no layers": ("cost.layers", 0, "Expected `int` >= 1 - at `$.cost.layers`"),
    "no ranks": ("ranks", 0, "Expected `int` >= 1 - at `$.ranks`"),
    "ranks": ("ranks", 10**9, "Expected `int` <= 1048576 - at `$.ranks`"),
    "sums": ("sums", [{"members": 1, "latency_seconds": 0.0, "seconds_per_token": 0.0}], "Expected `int` >= 2"),
    "bytes": ("token_bytes", -1.0, "Expected `float` >= 0.0 - at `$.token_bytes`"),
    "shapes": ("shapes", [SHAPE], "expected shapes of 5 layers, got 1"),
    "heads": ("shapes", [{**SHAPE, "q_heads": 3}] * 5, "expected shapes of layers with heads and elements, got others"),
    "huge": ("shapes", [{**SHAPE, "k_dim": 1 << 40}] * 5, "expected shapes of layers with heads and elements"),
    "no cost": ("cost", None, "Expected `object`, got `null` - at `$.cost`"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_told(name, tmp_path):
    place, value, said = DAMAGES[name]
    whole = msgspec.to_builtins(with_sums(profile(4), 1e-4, 2))
    *path, last = place.split(".")
    part = whole
    for key in path:
        part = part[key]
    part[last] = value
    refused(tmp_path, msgspec.json.encode(whole), said.replace("$", r"\$"))


def refused(folder, data, said):
    (folder / "p.json").write_bytes(data)
    with pytest.raises(UserError, match=rf"p.json: expected a profile that hpcdecode calibrate wrote: .*{said}"):
        read(str(folder / "p.json"))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"{}", "missing required field"),
        (b"\xff\xfe{\x00", "JSON is malformed"),
        (b'{"ranks": NaN}', "JSON is malformed"),
        (b'{"machine": {"a": ' + b"[" * 100_000, "RecursionError"),
    ],
)
def test_files_that_are_no_profiles(data, said, tmp_path):
    refused(tmp_path, data, said)


def test_a_half_of_a_profile(tmp_path):
    data = msgspec.json.encode(profile(1))
    refused(tmp_path, data[: len(data) // 2], "Input data was truncated")
    with pytest.raises(UserError, match="expected a profile that hpcdecode calibrate wrote: FileNotFoundError"):
        read(str(tmp_path / "none.json"))


def test_whole_profiles_are_read(tmp_path):
    for found in (profile(1), profile(4), with_sums(profile(4), 1e-4, 2)):
        (tmp_path / "p.json").write_bytes(msgspec.json.encode(found))
        assert read(str(tmp_path / "p.json")) == found
