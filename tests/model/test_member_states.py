"""Members of models whose layers keep states: heads are dealt out, with the sums of norms that go over all of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.model import load_split
from hpcdecode.model.frontend.cache import cached_trace
from hpcdecode.model.frontend.choose import leave_out_indexers
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.run.load import ModelPart
from hpcdecode.model.run.mixers import layer_shapes
from tests.support.hybrids import HYBRIDS
from tests.support.members import check_members

NGRAMS = "qwen4_exp_text"  # embeddings of several tokens have states that are not dealt out
SUMS = {  # of a step of two members, where it is not two a layer
    "granitemoehybrid": 8,  # the norms of Mamba-2 go over all heads
    "olmo_hybrid": 8,  # the norms of q and of k go over all heads
    "nemotron_h": 4,  # of four layers, two of which have nothing but experts or an MLP
    "falcon_h1": 4,  # of two layers, which attend and keep states side by side
    "zamba2": 5,
    "jamba": 5,
    "mamba2": 2,
    "mamba": 4,  # of two layers, which keep two states each
    "falcon_mamba": 4,
}


def traced(folder, name: str, **values: object) -> Trace:
    """Trace of a hybrid that has no weights, kept from run to run; values: of its config."""
    config = HYBRIDS[name]()
    for key, value in values.items():
        assert hasattr(config, key)
        setattr(config, key, value)
    config.save_pretrained(folder)
    return cached_trace(folder, torch.float32)


def shares(whole: Trace, own: Trace) -> list[tuple[int, int]]:
    """Heads and heads of q and k of each layer with states, as shares of the whole one's."""
    pairs = zip(layer_shapes(whole), layer_shapes(own), strict=True)
    return [(w.heads // o.heads, w.k_heads // o.k_heads) for w, o in pairs if isinstance(w, RecurrentShape)]


QUICK = ("qwen3_next", "bamba", "zamba2", "mamba", "kimi_linear", "nemotron_h", "lfm2", "falcon_h1")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.full) for n in HYBRIDS if n != NGRAMS]
)
def test_two_members_have_half_of_every_state(name, tmp_path):
    whole = traced(tmp_path, name)
    one, two = check_members(whole, 2)
    for own in (one, two):
        assert own.membership.share < 0.52 and not any(own.membership.copied)
        assert own.membership.sums == SUMS.get(name, 2 * len(whole.attends))
        assert shares(whole, own) == [(2, min(k_heads, 2)) for k_heads in keys(whole)]
    for heads in zip(one.membership.heads, two.membership.heads, strict=True):
        assert all(a.stop == b.start for a, b in pairwise(heads))


def test_embeddings_of_several_tokens_are_on_each_member(tmp_path):
    """Ids of earlier tokens are whole, and so are convolutions of residual streams; other states are dealt out."""
    whole = leave_out_indexers(traced(tmp_path, NGRAMS))
    for own in check_members(whole, 2):
        assert own.membership.copied == (True, True, False, False, True, False)
        assert shares(whole, own) == [(1, 1), (1, 1), (2, 2), (1, 1), (2, 2)] and own.membership.sums == 2 * 3


def keys(whole: Trace) -> list[int]:
    """Heads of q and k of each layer with states."""
    return [shape.k_heads for shape in layer_shapes(whole) if isinstance(shape, RecurrentShape)]


@pytest.mark.parametrize(
    ("name", "groups", "sums"),
    [("bamba", "mamba_n_groups", 8), ("mamba2", "n_groups", 4)],
)
def test_a_norm_over_all_heads_is_a_sum_of_parts(name, groups, sums, tmp_path):
    """One head of q and k serves all value heads, so each member has it; one more sum in each layer with states."""
    whole = traced(tmp_path, name, **{groups: 1})
    for own in check_members(whole, 2):
        assert own.membership.sums == sums and own.membership.share < 0.53
        assert set(shares(whole, own)) == {(2, 1)}


def test_a_head_of_keys_may_be_on_several_members(tmp_path):
    whole = traced(tmp_path, "qwen3_5", num_key_value_heads=4)
    for own in check_members(whole, 4):
        assert set(shares(whole, own)) == {(4, 2)} and not any(own.membership.copied)


def test_heads_that_members_do_not_divide_are_on_each(tmp_path):
    whole = traced(tmp_path, "qwen3_next")
    for own in check_members(whole, 3):
        assert own.membership.copied == (True,) * 3 and shares(whole, own) == [(1, 1)] * 2
        assert 1 / 3 < own.membership.share < 0.9  # experts are dealt out


def test_load_split_loads_a_member_with_its_weights_of_states(checkpoint):
    path = checkpoint("qwen3_next")
    whole, own = load_split(path, dtype="float32"), load_split(path, dtype="float32", part=ModelPart(2, 1))
    q, k, v = whole.recurrent_weights(0).convolution.split([32, 32, 96])
    own_taps = own.recurrent_weights(0).convolution
    assert torch.equal(own_taps, torch.cat([q[16:], k[16:], v[48:]]))
    assert own.attends[0].state_bytes * 2 == whole.attends[0].state_bytes
