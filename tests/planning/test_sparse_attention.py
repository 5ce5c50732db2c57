"""What indexers of sparse attention save and take, and what windows save, in costs, plans and simulations."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from hpcdecode.attention.shapes import IndexerShape, LayerShape
from hpcdecode.planning import lengths, planner
from hpcdecode.planning.cluster import by_data_sheets
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.fit import chosen_at_rate
from hpcdecode.planning.hardware import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, LinkSpeed, device
from hpcdecode.planning.layer_work import read_bytes, without_indexers
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.seen_tokens import Beyond, ChosenTokens, WindowTokens, of_chunk, plus
from hpcdecode.planning.serving import Server
from hpcdecode.planning.simulator import SimulatedGroups, simulate
from hpcdecode.ranks.wishes import GroupShape
from hpcdecode.schedule.limits import LaneLimits

CHOSEN = ChosenTokens(
    most=100,
    skipped_seconds_per_cached_token=8e-7,
    score_seconds_per_cached_token=2e-7,
    skipped_seconds_per_pair=8e-9,
    score_seconds_per_pair=1e-9,
)
ALL = Cost(
    layers=4,
    slice_tokens=[1, 1024],
    slice_seconds=[1e-3, 1e-2],
    logits_tokens=[1, 1024],
    logits_seconds_at=[1e-4, 1e-3],
    attend_seconds_per_cached_token=1e-6,
    attend_seconds_per_sequence=1e-5,
    prefill_seconds_per_pair=1e-8,
    wire_seconds_per_token=0.0,
    message_latency_seconds=0.0,
)
SPARSE = replace(ALL, chosen=CHOSEN)
PLAIN = LayerShape(1, 576, 512, 128, 192**-0.5, latent=True)
CHOOSES, FOLLOWS = (replace(PLAIN, indexer=IndexerShape(2048, *index)) for index in ((64, 128), (0, 0)))
MIXED = (PLAIN, CHOOSES, FOLLOWS, CHOOSES)  # attends to all; chooses; takes that choice; chooses
SIZE = ModelSize(10**9, 10**8, MIXED, 1 << 17, 7168)
H100, EPYC = device("h100"), device("epyc-9004")


@pytest.mark.parametrize("length", [1, 99, 100, 101, 5000])
def test_sequences_of_one_length_cost_what_each_of_them_does(length):
    """Beyond `most` a layer scores all tokens, and attends to the chosen ones."""
    each = 1e-6 * length + 1e-5 if length <= 100 else 2e-7 * length + (2e-7 * length + 8e-7 * 100) + 1e-5
    got = SPARSE.attention_seconds(np.array([length, 7 * length, 0]), np.array([1, 7, 0]))
    assert got == pytest.approx([each, 7 * each, 0])
    pair = 1e-8 * length if length <= 100 else 1e-9 * length + (2e-9 * length + 8e-9 * 100)
    assert SPARSE.pair_seconds(16 * length, 16) == pytest.approx(16 * pair)


def test_a_lane_costs_what_attention_to_all_does_until_tokens_are_left_out():
    def lane(cost: Cost, length: int):
        found = cost.lane_seconds(40, 32, 32 * length, np.array([8 * length]), np.array([8]))
        return found.s_rank, float(found.r_ranks[0])

    assert lane(SPARSE, 100) == pytest.approx(lane(ALL, 100))
    (s, r), (s_all, r_all) = lane(SPARSE, 4000), lane(ALL, 4000)
    assert s_all - s == pytest.approx(32 * (8e-9 * 3900 - 1e-9 * 4000))
    assert r_all - r == pytest.approx(8 * (8e-7 * 3900 - 2e-7 * 4000))


@pytest.mark.parametrize("length", [1, 128, 129, 5000])
def test_windows_cost_what_a_query_sees_of_them(length):
    """Layers with 0.4 of the bytes see 128 tokens, some with 0.5 of them 1,000."""
    windowed = replace(ALL, windows=(WindowTokens(128, 4e-7, 4e-9), WindowTokens(1000, 5e-7, 5e-9)))
    seen = 0.1 * length + 0.4 * min(length, 128) + 0.5 * min(length, 1000)
    got = windowed.attention_seconds(np.array([length, 7 * length, 0]), np.array([1, 7, 0]))
    assert got == pytest.approx([1e-6 * seen + 1e-5, 7 * (1e-6 * seen + 1e-5), 0])
    assert windowed.pair_seconds(16 * length, 16) == pytest.approx(16e-8 * seen)
    twice = windowed.times(2)
    assert twice.attention_seconds(length, 1) == pytest.approx(2 * windowed.attention_seconds(length, 1))


def test_rows_of_all_lengths_cost_what_each_of_them_does():
    """A row of 5,000 tokens, and many of 50, which windows of 128 see whole."""
    cost = replace(SPARSE, windows=(WindowTokens(128, 4e-7, 4e-9), WindowTokens(1000, 1e-7, 1e-9)))
    lengths = np.array([5000, *[50] * 99, 600])
    beyond = [Beyond((lengths - most).clip(0).sum(), (lengths > most).sum()) for most in cost.most_seen]
    each = [float(cost.attention_seconds(float(n), 1)) for n in lengths]
    assert float(cost.attention_seconds(lengths.sum(), len(lengths), beyond)) == pytest.approx(sum(each))
    assert float(cost.attention_seconds(lengths.sum(), len(lengths))) != pytest.approx(sum(each), rel=0.1)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 90), (60, 70), (99, 1), (100, 300), (5000, 16)])
def test_every_token_of_a_prompt_costs_what_it_sees(start, count):
    cost = replace(SPARSE, windows=(WindowTokens(128, 4e-9, 4e-9),))
    keys = range(start + 1, start + count + 1)
    beyond = plus(of_chunk(cost.most_seen, start, count), of_chunk(cost.most_seen, 0, 1))
    each = [cost.pair_seconds(n, 1) for n in [*keys, 1]]
    assert cost.pair_seconds(sum(keys) + 1, count + 1, beyond) == pytest.approx(sum(each))


def test_windows_are_counted_by_data_sheets():
    """Of four layers three have windows. On an H100 bytes take longer, of which KV heads have all."""
    full, short = LayerShape(8, 64, 64, 64, 0.125), LayerShape(8, 64, 64, 64, 0.125, window=128)
    cost = of_devices(replace(SIZE, shapes=(short, full, short, short)), H100, H100, 5e10, 1e-5)
    (window,) = cost.windows
    assert window.most == 128
    assert window.skipped_seconds_per_cached_token == pytest.approx(0.75 * cost.attend_seconds_per_cached_token)
    assert window.skipped_seconds_per_pair == pytest.approx(0.75 * cost.prefill_seconds_per_pair)
    far, near = (float(cost.attention_seconds(tokens, 1)) for tokens in (128_000, 128))
    assert far / near == pytest.approx((128_000 + 3 * 128) / (4 * 128), rel=1e-3)
    assert of_devices(replace(SIZE, shapes=(full,)), H100, EPYC, 5e10, 1e-5).windows == ()


def test_scores_are_counted_by_data_sheets():
    """On CPU nodes FLOP take longer than bytes: 128 heads that share a latent, 64 index heads that share a key."""
    reading, products = BANDWIDTH_EFFICIENCY * EPYC.bytes_per_second, COMPUTE_EFFICIENCY * EPYC.flop_per_second
    cost = of_devices(SIZE, H100, EPYC, 5e10, 1e-5)
    assert cost.chosen is not None and cost.chosen.most == 2048
    attend, score = 2 * 128 * (576 + 512), 2 * 64 * (128 + 1)
    assert cost.attend_seconds_per_cached_token == pytest.approx(4 * attend / products)
    assert cost.chosen.skipped_seconds_per_cached_token == pytest.approx(3 * attend / products)
    assert cost.chosen.score_seconds_per_cached_token == pytest.approx(max(2 * score / products, 2 * 2 * 128 / reading))
    on_s = COMPUTE_EFFICIENCY * H100.flop_per_second
    assert cost.chosen.skipped_seconds_per_pair == pytest.approx(3 * attend / on_s)
    assert cost.chosen.score_seconds_per_pair == pytest.approx(2 * score / on_s)
    far, without = (float(c.attention_seconds(131_072, 1)) for c in (cost, replace(cost, chosen=None)))
    assert 0.25 * without < far < 0.35 * without  # the layer that attends to all, and scores
    assert of_devices(replace(SIZE, shapes=(PLAIN,) * 4), H100, EPYC, 5e10, 1e-5).chosen is None


def test_members_share_heads_and_not_scores():
    one, two = (of_devices(SIZE, H100, EPYC, 5e10, 1e-5, shape=GroupShape(n, 1)).chosen for n in (1, 2))
    assert one is not None and two is not None
    assert two.skipped_seconds_per_cached_token == pytest.approx(one.skipped_seconds_per_cached_token / 2)
    assert two.score_seconds_per_cached_token == one.score_seconds_per_cached_token
    assert one.of_member(2).skipped_seconds_per_pair == pytest.approx(two.skipped_seconds_per_pair)
    assert one.of_member(2).score_seconds_per_pair == two.score_seconds_per_pair


def test_a_profile_takes_scores_at_the_rate_of_attention():
    chosen = chosen_at_rate(ALL, MIXED, "bfloat16")
    assert chosen is not None and chosen.most == 2048
    assert chosen.skipped_seconds_per_cached_token == pytest.approx(0.75e-6)
    ratio = 2 * 2 * 64 * 129 / (4 * 2 * 128 * (576 + 512))
    assert chosen.score_seconds_per_cached_token == pytest.approx(ratio * 1e-6)
    assert chosen.score_seconds_per_pair == pytest.approx(ratio * 1e-8)
    assert chosen_at_rate(ALL, (PLAIN,) * 4, "bfloat16") is None


def test_a_profile_takes_index_keys_as_bytes_where_k_and_v_are_read():
    """Of MiniMax-M3: 256 bytes of an index key beside 2,048 of K and V, and 15 blocks of 128 tokens with the last."""
    plain = LayerShape(4, 128, 128, 64, 128**-0.5)
    blocks = replace(plain, indexer=IndexerShape(1920, 4, 128, 128, 1))
    chosen = chosen_at_rate(ALL, (plain, blocks, blocks, blocks), "bfloat16")
    assert chosen is not None and chosen.most == 2048
    assert chosen.skipped_seconds_per_cached_token == pytest.approx(0.75e-6)
    assert chosen.score_seconds_per_cached_token == pytest.approx(3 * 256 / (4 * 2048) * 1e-6)
    assert chosen.score_seconds_per_pair == pytest.approx(3 * 2 * 4 * 129 / (4 * 2 * 64 * 256) * 1e-8)


def test_costs_on_disk_have_it_and_older_ones_do_not():
    for cost in (SPARSE, ALL):
        assert msgspec.json.decode(msgspec.json.encode(cost), type=Cost) == cost
    older = msgspec.to_builtins(ALL)
    del older["chosen"]
    assert msgspec.convert(older, Cost) == ALL


def test_plan_and_simulation_agree_beyond_what_is_chosen():
    """Rows of 1,000 prompt tokens, of which 100 are chosen: R-ranks take far less than for all tokens."""
    rows = planner.MeanRows(1000, 128)
    limits = [LaneLimits(32, 8, 128, 2048, None)] * 2
    speeds = {}
    for name, cost in (("all", replace(ALL, attend_seconds_per_cached_token=1e-5)), ("chosen", SPARSE)):
        slow = replace(cost, attend_seconds_per_cached_token=1e-5)
        if slow.chosen:
            slow = replace(slow, chosen=replace(CHOSEN, skipped_seconds_per_cached_token=1e-5))
        world = SimulatedGroups(slow, [1 << 20], limits)
        short, long = (simulate([world], lengths.fixed(n * 64, 1000, 129)) for n in (4, 12))
        speeds[name] = (long.tokens - short.tokens) / (long.seconds - short.seconds)  # without start and end
        assert planner.predict(slow, rows, 64, 2, 1).tokens_per_second == pytest.approx(speeds[name], rel=0.1)
    assert speeds["chosen"] > 3 * speeds["all"]


def test_a_server_counts_chosen_tokens():
    server = Server(SPARSE, 1 << 20, 0.0)
    assert server.attention(4999, 1) == pytest.approx(float(SPARSE.attention_seconds(5000, 1)))
    assert server.attention(4999, 1) < 0.6 * Server(ALL, 1 << 20, 0.0).attention(4999, 1)
    assert server.attention(4000, 64) == pytest.approx(SPARSE.pair_seconds(64 * 4000 + 64 * 65 // 2, 64))


WINDOW = LayerShape(1, 512, 512, 64, 512**-0.5, 128, None, True, True)
SPARSE_ENTRIES = replace(WINDOW, indexer=IndexerShape(512, 64, 128), compress_rate=4)
ENTRIES = ModelSize(10**9, 10**8, (SPARSE_ENTRIES, replace(WINDOW, compress_rate=128)), 1 << 20, 4096)


def test_compressed_entries_are_read_once_for_so_many_tokens_and_windows_once_a_step():
    """FLOP take longer than bytes: 64 heads share one key of 512, which is their value, too."""
    cost, none = of_devices(ENTRIES, H100, EPYC, 5e10, 1e-5), of_devices(SIZE, H100, EPYC, 5e10, 1e-5)
    products, row = COMPUTE_EFFICIENCY * EPYC.flop_per_second, 2 * 64 * 2 * 512
    assert cost.attend_seconds_per_cached_token == pytest.approx(row * (1 / 4 + 1 / 128) / products)
    assert cost.attend_seconds_per_sequence == pytest.approx(2 * 128 * row / products)
    assert none.attend_seconds_per_sequence == 0
    assert cost.chosen is not None and cost.chosen.most == 4 * 512
    assert cost.chosen.skipped_seconds_per_cached_token == pytest.approx(row / 4 / products)
    assert cost.chosen.score_seconds_per_cached_token == pytest.approx(2 * 64 * 129 / 4 / products)


@pytest.mark.parametrize("size", [SIZE, ENTRIES])
def test_torch_chooses_and_attends_on_a_gpu(size):
    """It moves several times the bytes; a token that is not chosen saves what attending to it takes, and no more."""
    network, moved = LinkSpeed(5e10, 1e-5), H100.bytes_per_second * H100.cache_share
    gpu, ideal = (of_devices(size, H100, H100, 5e10, 1e-5, kernels=kernels) for kernels in (False, True))
    plain = without_indexers(size.shapes)
    assert gpu.attend_seconds_per_cached_token > 4 * read_bytes(plain, "bfloat16") / moved
    assert 0 < gpu.chosen.skipped_seconds_per_cached_token <= gpu.attend_seconds_per_cached_token
    assert gpu.chosen.score_seconds_per_cached_token > 2 * ideal.chosen.score_seconds_per_cached_token
    assert by_data_sheets(size, EPYC, 0, H100, 4, network, "bfloat16", 64 << 30).layouts("auto")
