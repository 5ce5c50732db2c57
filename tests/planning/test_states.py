"""Plans of models with recurrent states and latents: what sequences count as, what steps take, what is refused."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from hpcdecode.attention.base import KV_DTYPES
from hpcdecode.attention.footprint import WHOLE, Footprint
from hpcdecode.attention.reach import Reach
from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import IndexerShape, LayerShape, MixerShape
from hpcdecode.attention.sizes import ENDLESS_BLOCK
from hpcdecode.cli import main
from hpcdecode.errors import UserError
from hpcdecode.planning import lengths, planner
from hpcdecode.planning.cluster import by_data_sheets
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.fit import Sample, fit, predicted
from hpcdecode.planning.group_shape import ONE, tried
from hpcdecode.planning.hardware import BANDWIDTH_EFFICIENCY, COMPUTE_EFFICIENCY, LinkSpeed, device
from hpcdecode.planning.kv_unit import TOKENS, KvUnit
from hpcdecode.planning.layer_work import device_kv_bytes, kv_bytes, of_member, on_kernels
from hpcdecode.planning.layout_planner import GroupWishes, planned_layout
from hpcdecode.planning.layouts import RanksAlike, replicas, split
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.servers.base import ServerLimits
from hpcdecode.planning.serving import Server, of_device, serve
from hpcdecode.planning.simulated_feed import SimulatedFeed
from hpcdecode.planning.simulated_lane import SimulatedLane
from hpcdecode.planning.simulator import SimulatedGroups, simulate
from hpcdecode.planning.steady_load import SteadyLoad
from hpcdecode.ranks.wishes import GroupShape
from hpcdecode.schedule.auto import FULL, load_limit
from hpcdecode.schedule.limits import LaneLimits
from hpcdecode.schedule.placement import Placement

COST = Cost(8, [1, 512], [2e-2, 6e-2], [1, 512], [1e-3, 3e-3], 2e-6, 5e-4, 1e-8, 1e-5, 1e-5)
STATES = KvUnit(24_576.0, Footprint(1, 3200))
ENDLESS = KvUnit(6.0, Footprint(ENDLESS_BLOCK))
LINEAR = RecurrentShape(32, 16, 128, 128, 4, True, True, True, 0.1, 1, True, element_bytes=2)
FULL_ATTENTION = LayerShape(2, 256, 256, 16, 0.1)
LATENT = LayerShape(1, 576, 512, 128, 0.1, latent=True)
EVERY_HEAD = LayerShape(128, 192, 128, 128, 0.1)
HYBRID = ModelSize(8_000_000_000, 300_000_000, (LINEAR, LINEAR, LINEAR, FULL_ATTENTION) * 12, None, 2048)
ALONE = ModelSize(8_000_000_000, 300_000_000, (LINEAR,) * 48, None, 2048)
MLA = ModelSize(8_000_000_000, 300_000_000, (LATENT,) * 60, None, 7168)
EXPANDED = replace(MLA, shapes=(EVERY_HEAD,) * 60)
CHOOSING = replace(MLA, shapes=(replace(LATENT, indexer=IndexerShape(2048, 64, 128)),) * 60)
H100, EPYC = device("h100"), device("epyc-9004")
NETWORK = LinkSpeed(5e10, 1e-5)


def cluster(size, s, s_count, r, r_count, kv_dtype="bfloat16", shape=ONE):
    return by_data_sheets(size, s, s_count, r, r_count, NETWORK, kv_dtype, 128 << 30, shape)


def names(found):
    return {layout.name for layout in found.layouts("auto")}


@pytest.mark.parametrize(("unit", "each"), [(TOKENS, 52), (STATES, 3252), (ENDLESS, ENDLESS_BLOCK)])
def test_as_many_sequences_run_as_there_is_room_for(unit, each):
    """Rows of 20 + 33 tokens, the last of which is never kept, with room for five of them or for nearly six states."""
    for capacity in (5 * each, max(6 * unit.fixed_tokens - 1, 5 * each)):
        limits = LaneLimits(32, 4, 32, 512, None, schedule="fifo")
        outcome = simulate([SimulatedGroups(COST, [capacity], [limits], unit=unit)], lengths.fixed(40, 20, 33))
        assert outcome.peak_load == 5 * 52 and outcome.rows == 40 and not outcome.refused
    few = SimulatedGroups(COST, [each - 1], [limits], unit=unit)
    assert simulate([few], lengths.fixed(3, 20, 33)).refused == 3


@pytest.mark.parametrize(("unit", "each"), [(TOKENS, 118), (STATES, 3318), (ENDLESS, ENDLESS_BLOCK)])
def test_the_chosen_batch_fits_with_its_states(unit, each):
    """50 prompt tokens and 128 steps, F = 8: a sequence has 118 tokens in the mean at the peak."""
    batches = range(1, 80)
    for capacity in (each * 40, each * 50):
        choice = planner.Choice(capacity, 1, lanes=(1,), batches=batches, unit=unit)
        fast = replace(COST, slice_seconds=[2e-2, 2e-2], attend_seconds_per_sequence=0.0)
        fast = replace(fast, attend_seconds_per_cached_token=1e-9)
        plan = planner.fastest(fast, planner.MeanRows(50, 128), choice)
        most = int(FULL * capacity / each)
        assert planner.ENOUGH * most <= plan.batch <= most


@pytest.mark.parametrize("layout", [split(COST, 1 << 20, 1, 2, unit=STATES), "replica"])
def test_states_take_as_long_as_in_the_simulator(layout):
    if layout == "replica":
        alone = replace(COST, wire_seconds_per_token=0.0, message_latency_seconds=0.0, shared_core_fraction=1.0)
        layout = replicas(RanksAlike("", 1, alone, 1 << 20, 1 << 20, unit=STATES))
    (part,) = layout.parts
    lanes = 2 if part.r_ranks else 1
    plan = planned_layout(layout, planner.MeanRows(50, 128), GroupWishes(batches=(64,), lanes=(lanes,)))
    limits = [LaneLimits(64 // lanes, 8, 128, 512 if part.r_ranks else 2048, None)] * lanes
    world = SimulatedGroups(part.cost, [part.capacity] * max(part.r_ranks, 1), limits, unit=part.unit)
    short, long = (simulate([world], lengths.fixed(n * 64, 50, 129)) for n in (4, 12))
    speed = (long.tokens - short.tokens) / (long.seconds - short.seconds)  # without start and end
    assert plan.tokens_per_second == pytest.approx(speed, rel=0.08)
    free = replace(part.cost, attend_seconds_per_sequence=0.0)
    assert planner.predict(free, planner.MeanRows(50, 128), 64, lanes, 1).step.r_rank < 0.7 * plan.groups[0].step.r_rank


def test_an_r_rank_takes_the_longer_of_bytes_and_flop():
    """On CPU nodes latents are bound by FLOP, K and V and states by bytes; prompts go through states in cache."""
    reading, products = BANDWIDTH_EFFICIENCY * EPYC.bytes_per_second, COMPUTE_EFFICIENCY * EPYC.flop_per_second
    hybrid, latent, heads = (of_devices(size, H100, EPYC, 5e10, 1e-5) for size in (HYBRID, MLA, EXPANDED))
    assert hybrid.attend_seconds_per_cached_token == pytest.approx(12 * 2 * 2 * 2 * 256 / reading)
    state, window = 36 * 32 * 128 * 128 * 4, 36 * 4 * 64 * 128 * 2
    assert hybrid.attend_seconds_per_sequence == pytest.approx((2 * state + window) / reading)
    assert 0 < hybrid.append_seconds_per_prompt_token < hybrid.attend_seconds_per_sequence
    assert latent.attend_seconds_per_cached_token == pytest.approx(60 * 2 * 128 * (576 + 512) / products)
    assert heads.attend_seconds_per_cached_token == pytest.approx(60 * 2 * 128 * (192 + 128) / reading)
    assert latent.wire_seconds_per_token == pytest.approx(60 * 279_680 / 5e10)
    for cost in (latent, heads):
        assert cost.attend_seconds_per_sequence == cost.append_seconds_per_prompt_token == 0
    two = of_devices(MLA, H100, EPYC, 5e10, 1e-5, shape=GroupShape(2, 1))
    assert two.attend_seconds_per_cached_token == pytest.approx(latent.attend_seconds_per_cached_token / 2)
    assert two.wire_seconds_per_token > latent.wire_seconds_per_token / 2  # each member sends the latent


def _odd(shape: MixerShape) -> MixerShape:
    """A shape of states whose rows no kernel takes."""
    return replace(shape, v_dim=126) if isinstance(shape, RecurrentShape) else shape


def test_on_a_gpu_torch_moves_more_than_kernels_would():
    """Kernels read K, V, latents and states once; torch gathers int8 latents, and goes through scores many times.

    So it goes through states for which there are no kernels.
    """
    reading = H100.bytes_per_second * H100.cache_share
    hybrid, latent, heads = (of_devices(size, H100, H100, 1e12, 0.0) for size in (HYBRID, MLA, EXPANDED))
    assert heads.attend_seconds_per_cached_token == pytest.approx(60 * 81_920 / reading)
    flop = 60 * 2 * 128 * (576 + 512)
    assert latent.attend_seconds_per_cached_token == pytest.approx(flop / (0.085 * H100.flop_per_second))
    few = replace(MLA, shapes=(replace(LATENT, q_heads=16),) * 60)
    few_heads = of_devices(few, H100, H100, 1e12, 0.0)
    assert few_heads.attend_seconds_per_cached_token == pytest.approx(60 * 1152 / reading)
    codes = of_devices(MLA, H100, H100, 1e12, 0.0, "int8")
    moved = 4 * 580 + 4 * 128 * (9 + 4 * 514 / 512)
    assert codes.attend_seconds_per_cached_token == pytest.approx(60 * moved / reading)
    state, window = 36 * 32 * 128 * 128 * 4, 36 * 4 * 64 * 128 * 2
    assert hybrid.attend_seconds_per_sequence == pytest.approx((2 * state + window) / reading)
    assert 0 < hybrid.append_seconds_per_prompt_token < hybrid.attend_seconds_per_sequence
    odd = replace(HYBRID, shapes=tuple(_odd(shape) for shape in HYBRID.shapes))
    by_torch = of_devices(odd, H100, H100, 1e12, 0.0)
    assert by_torch.attend_seconds_per_sequence == pytest.approx(14 * state * 126 / 128 / reading)
    assert by_torch.append_seconds_per_prompt_token == pytest.approx(10 * state * 126 / 128 / reading)
    other = of_devices(MLA, H100, H100, 1e12, 0.0, "int8", kernels=True)
    assert other.attend_seconds_per_cached_token == pytest.approx(flop / (COMPUTE_EFFICIENCY * H100.flop_per_second))
    assert other.attend_seconds_per_cached_token < codes.attend_seconds_per_cached_token / 5


@pytest.mark.parametrize("size", [HYBRID, ALONE])
def test_gpus_hold_states(size):
    found = cluster(size, H100, 2, EPYC, 4)
    assert {"4 epyc-9004 replicas", "2 h100 replicas", "2 S + 4 R, pools shared"} <= names(found)
    assert not found.refused
    assert names(cluster(size, H100, 2, device("a10"), 2))


@pytest.mark.parametrize("size", [HYBRID, ALONE])
@pytest.mark.parametrize("shape", [GroupShape(2, 1), GroupShape(1, 2)])
def test_members_and_stages_share_states(size, shape):
    group, one = (cluster(size, EPYC, 0, EPYC, 4, shape=each).r for each in (shape, ONE))
    assert group.unit.token_bytes == pytest.approx(one.unit.token_bytes / 2, rel=0.1)
    assert group.unit.fixed_tokens == one.unit.fixed_tokens


def test_members_have_heads_of_states_evenly():
    with pytest.raises(UserError, match="--tp 3: expected a divisor of the 32 heads of a layer"):
        cluster(ALONE, EPYC, 0, EPYC, 6, shape=GroupShape(3, 1))
    assert {shape.tp for shape in tried(ALONE, 5e9, 32)} == {1, 2, 4, 8, 16}  # 16 heads of q and k
    assert {shape.tp for shape in tried(HYBRID, 5e9, 32)} == {1, 2}  # two KV heads
    assert of_member([replace(LINEAR, k_heads=1)], 8) == [replace(LINEAR, heads=4, k_heads=1)]


def test_ranks_of_all_devices_hold_index_keys():
    """As in jobs."""
    found = cluster(CHOOSING, H100, 2, EPYC, 4)
    for name in ("4 epyc-9004 replicas", "2 h100 replicas", "2 h100 + 4 epyc-9004 replicas"):
        (one,) = (one for one in found.layouts("replicas") if one.name == name)
        assert {part.unit.token_bytes for part in one.parts} == {60 * (1152 + 256)}
    assert cluster(MLA, H100, 2, device("a100"), 4).layouts("split")
    for kv_dtype in ("int4", "k8v4"):
        with pytest.raises(UserError, match=f"--kv-dtype {kv_dtype}: expected one of"):
            cluster(MLA, H100, 2, EPYC, 4, kv_dtype)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_kernels_of_a_gpu_read_k_and_v_once(kv_dtype):
    """Codes take them longer, as measured; torch's operations, which wide V takes, move several times as much."""
    wide, longer = replace(FULL_ATTENTION, v_dim=512), {"int8": 1.8, "k8v4": 2.8, "int4": 3.2}.get(kv_dtype, 1)
    stored = kv_bytes([FULL_ATTENTION], kv_dtype)
    assert on_kernels([FULL_ATTENTION], kv_dtype) and not on_kernels([wide], kv_dtype)
    assert device_kv_bytes([FULL_ATTENTION], kv_dtype, kernels=True) == longer * stored
    assert device_kv_bytes([wide], kv_dtype, kernels=False) > 4 * kv_bytes([wide], kv_dtype)


@pytest.mark.parametrize(("state_load", "expected"), [(0, [1, 7]), (10_000, [4, 4])])
def test_r_ranks_have_equal_parts_of_tokens_and_states(state_load, expected):
    """A row of 1,000 tokens and seven of 10 on two R-ranks: states that take long are dealt out evenly."""
    prompt = [1000, *[10] * 7]
    feed = SimulatedFeed(lengths.of(prompt, [20] * 8))
    placement = Placement([100_000] * 2, WHOLE, 1, reach=Reach(state=state_load))
    lane = SimulatedLane(0, feed, placement, LaneLimits(8, 1, 19, 4096, None, schedule="fifo"))
    works = [lane.step(now) for now in range(10)]
    assert sorted(works[-1].sequences.tolist()) == expected


def test_the_load_limit_leaves_room_for_states():
    """Of 32 rows of 100 + 64 tokens at the peak, as many as fit with their states."""
    sizes = 32, 8, 120, 100.0
    assert load_limit(*sizes, 1 << 20) == load_limit(*sizes, 1 << 20, Footprint(1, 3200)) == 32 * 164
    assert load_limit(*sizes, 10 * 164) == int(0.9 * 10 * 164)
    assert load_limit(*sizes, 10 * (164 + 3200), Footprint(1, 3200)) == int(0.9 * 10 * 164)


def known(load, cost, prompts):
    """What the timeline of one process would say of a load."""
    attended = load.batch * load.attended_tokens
    attend = cost.attend_seconds_per_cached_token * attended + cost.attend_seconds_per_sequence * load.batch
    own = {
        "slice": cost.body_seconds(load.batch + load.chunk),
        "logits": cost.logits_seconds(load.batch),
        "attend": attend + prompts * load.chunk,
    }
    return [{**own, "step": sum(own.values())}]


@pytest.mark.parametrize("attends", [True, False])
def test_prompts_that_go_through_states_are_fitted(attends):
    """A process whose prompts take their time while it attends: states that prompts go through, nothing appended."""
    loads = [SteadyLoad(batch, 1, 64, 4) for batch in (4, 32, 128)]
    loads += [SteadyLoad(32, 1, 64, 4, prompt=p, chunk=c) for p, c in ((160, 32), (512, 512))]
    loads += [SteadyLoad(batch, 1, context, 4) for batch, context in ((16, 1024), (64, 256))]
    truth = replace(COST, slice_tokens=[4, 32, 64, 128, 544], slice_seconds=[0.01, 0.02, 0.03, 0.04, 0.1])
    truth = replace(truth, attend_seconds_per_cached_token=2e-6 * attends)
    samples = [Sample(load, known(load, truth, 3e-4)) for load in loads]
    cost = fit(samples, 8, attends=attends, keeps_states=True)
    assert cost.append_seconds_per_prompt_token == pytest.approx(3e-4)
    assert cost.attend_seconds_per_sequence == pytest.approx(truth.attend_seconds_per_sequence)
    assert cost.attend_seconds_per_cached_token == pytest.approx(truth.attend_seconds_per_cached_token)
    assert cost.prefill_seconds_per_pair == cost.prefill_seconds_per_step == 0
    for load, ranks in samples:
        assert predicted(cost, load, 1) == pytest.approx(ranks[0]["step"], rel=0.01)


@pytest.mark.parametrize("schedule", ["vllm", "fluid"])
def test_servers_hold_states(schedule):
    rows, limits = lengths.fixed(30, 20, 33), ServerLimits(16, 512, swap_space=0)
    alone = replace(COST, message_latency_seconds=0.0)
    plain, states = (serve(Server(alone, 5000, 0.0, 4, state), schedule, limits, rows) for state in (0, 1000))
    assert plain.peak_load > 4 * 53 >= states.peak_load > 0 and states.tokens == plain.tokens == 30 * 33
    server = of_device(HYBRID, H100)
    assert server.state_tokens == KvUnit.of(HYBRID.shapes, "bfloat16").state_tokens > 0
    assert server.attention(99, 1) == pytest.approx(
        100 * server.cost.attend_seconds_per_cached_token + server.cost.attend_seconds_per_sequence
    )
    assert of_device(ALONE, H100).block_tokens == ENDLESS_BLOCK and of_device(MLA, H100).state_tokens == 0


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "deepseek_v3", "falcon_h1"])
def test_commands_plan_and_simulate_them(name, checkpoint, capsys):
    rows = ("--fixed", 100, 65, "--rows", 500)
    machine = ("--model", checkpoint(name), "--s-device", "h100", "--r-device", "epyc-9004", "--r-ranks", 2)
    assert main(["plan", *map(str, (*machine, *rows))]) == 0
    said = capsys.readouterr().out
    assert said.startswith("layout: ")
    words = {"mamba2": "states of B = ", "deepseek_v3": "KV of B*(p + (S+F)/2) = "}
    assert words.get(name, " for a state) = ") in said and ("int4" in said) == (name != "deepseek_v3")
    assert main(["simulate", *map(str, (*machine, *rows, "--batch", 64, "--json"))]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["generated_tokens"] == 500 * 65 and found["r_busy"] > 0
    assert main(["simulate", *map(str, (*machine, *rows, "--batch", 64, "--layout", "replicas"))]) == 0
