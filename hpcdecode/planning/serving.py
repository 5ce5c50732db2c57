"""A device with weights and KV cache in its own memory, or several that compute as one, serving rows as they arrive.

An iteration takes the token-wise layers of all its tokens, and then its attention. Attention of prompts is bound by
arithmetic, that of decoding by reading the cache; a schedule that packs them has the two at once (FluidInfer). What is
swapped crosses to or from the host meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from hpcdecode.errors import UserError
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.data_sheets import of_devices
from hpcdecode.planning.group_shape import ONE, held_on
from hpcdecode.planning.hardware import MEMORY, Device
from hpcdecode.planning.kv_unit import KvUnit
from hpcdecode.planning.lengths import Lengths
from hpcdecode.planning.model_size import ModelSize
from hpcdecode.planning.outcome import Gaps, LoadHistory, SimulationOutcome
from hpcdecode.planning.servers import SERVING
from hpcdecode.planning.servers.base import (
    Iteration,
    KvBlocks,
    ScheduledTokens,
    ServedRequest,
    ServerLimits,
    Serving,
)

BLOCK_TOKENS = 16  # of a KV block


class Server(msgspec.Struct, frozen=True):
    """A device that serves; it is the `Estimate` of its schedule.

    Attributes:
        cost: What its steps cost.
        capacity: KV tokens.
        swap_seconds_per_token: K and V of a token, to the host or from there.
        block_tokens: Tokens of a KV block.
        state_tokens: Tokens that a request's recurrent state counts as.
    """

    cost: Cost
    capacity: int
    swap_seconds_per_token: float
    block_tokens: int = BLOCK_TOKENS
    state_tokens: int = 0

    def tokens(self, count: int) -> float:
        """Return T(count), the seconds of the token-wise layers."""
        return self.cost.body_seconds(count)

    def attention(self, cached: int, count: int) -> float:
        """Return the seconds in which `count` tokens of a request attend to `cached` ones and to each other.

        One token reads the cache, R * (cached + 1), and reads and writes the state. Several are bound by arithmetic:
        count * cached + count * (count + 1) / 2 pairs of query and key, and a pass through the state each.
        """
        if count == 1:
            return float(self.cost.attention_seconds(cached + 1, 1))
        pairs = self.cost.pair_seconds(count * cached + count * (count + 1) // 2, count)
        return pairs + self.cost.append_seconds_per_prompt_token * count


def of_device(size: ModelSize, device: Device, kv_dtype: str = "bfloat16") -> Server:
    """Return the server by its data sheet. It holds latents and recurrent states, as R-ranks on CPUs do.

    A token is swapped in kv_bytes_per_token / host_bytes_per_second (FluidInfer: 4*x*H/bw a layer for x tokens). The
    time to swap states is left out.

    Raises:
        UserError: If the weights leave no room for a KV cache.
    """
    if device.memory_bytes is None or device.is_host:
        raise UserError(f"S device: expected an accelerator with a memory of its own, got {device.name}")
    size, unit = held_on(size, device, ONE), KvUnit.of(size.shapes, kv_dtype)
    capacity = unit.capacity(device.room - size.weight_bytes)
    if capacity < 1:
        raise UserError(
            f"{device.name}: expected room beside {size.weight_bytes / 1e9:,.1f} GB of weights in {MEMORY:.0%} of its "
            f"{device.memory_bytes / 1e9:,.0f} GB, got none: take more devices, as in 4x{device.name}"
        )
    cost = of_devices(size, device, device, float("inf"), 0.0, kv_dtype, kernels=True)
    swap = size.kv_bytes_per_token(kv_dtype) / device.host_bytes_per_second
    blocks = unit.footprint.block_tokens if unit.endless else BLOCK_TOKENS
    return Server(cost, capacity, swap, blocks, unit.state_tokens)


class _AttentionSeconds(NamedTuple):
    """Seconds of the attention of some requests, by what binds it."""

    prompts: float
    decodes: float


class _Run:
    """A simulation under way."""

    def __init__(self, server: Server, policy: Serving, lengths: Lengths):
        self.server, self.policy, self.lengths = server, policy, lengths
        self.clock = self.s_seconds = self.r_seconds = 0.0
        self.refused = self.tokens = self.steps = self.swapped = 0
        self.active = 0  # requests that have arrived and not ended
        self.load = LoadHistory()
        self.latency = np.full(len(lengths), np.nan)
        self.gaps, self.largest_gap = Gaps(), np.full(len(lengths), np.nan)
        self._sampled_at: dict[int, float] = {}  # by row, when its latest token came
        self._new: list[int] = lengths.new.tolist()
        self._arrival: list[float] = lengths.arrival.tolist()
        self._next = 0

    def arrive(self) -> None:
        """Hand the schedule the rows that have arrived; if there is nothing else to do, wait for the next one."""
        while self._next < len(self._new) and (not self.active or self._arrival[self._next] <= self.clock):
            row = self._next
            self.clock = max(self.clock, self._arrival[row])
            prompt, most = int(self.lengths.prompt[row]), int(self.lengths.most[row])
            request = ServedRequest(row, prompt, most, self._arrival[row])
            self._next += 1
            if self.policy.refuses(request):
                self.refused += 1
                continue
            self.policy.add(request)
            self.active += 1

    def run(self, iteration: Iteration) -> None:
        """Let the time of an iteration pass, and sample its tokens."""
        sampled = [r for r, n in iteration.work if n == r.left]
        layers = self.server.tokens(sum(n for _, n in iteration.work)) + self.server.cost.logits_seconds(len(sampled))
        attention = self._attention_seconds(iteration)
        self.clock += max(layers + attention, iteration.swapped * self.server.swap_seconds_per_token)
        self.s_seconds += layers
        self.r_seconds += attention
        self.swapped += iteration.swapped
        self.steps += 1
        for request, count in iteration.work:
            request.cached += count
        self.load.add(self.clock, sum(r.cached for r, _ in iteration.work))
        self._sample(sampled)

    def _attention_seconds(self, iteration: Iteration) -> float:
        """Return the longer kind of every pack; both kinds one after the other if nothing is packed (FluidInfer)."""
        if iteration.packs:
            return sum(max(self._by_kind(pack)) for pack in iteration.packs)
        return sum(self._by_kind(iteration.work))

    def _by_kind(self, work: Sequence[ScheduledTokens]) -> _AttentionSeconds:
        decoding = [r.cached for r, n in work if n == 1]
        prompts = sum(self.server.attention(r.cached, n) for r, n in work if n > 1)
        read = self.server.cost.attention_seconds(sum(decoding) + len(decoding), len(decoding))
        return _AttentionSeconds(prompts, float(read))

    def _sample(self, sampled: Sequence[ServedRequest]) -> None:
        """Give every request its next token, and end those that have their last."""
        self.tokens += len(sampled)
        gaps: Counter[float] = Counter()
        for request in sampled:
            if request.generated:
                gap = self.clock - self._sampled_at[request.row]
                gaps[gap] += 1
                self.largest_gap[request.row] = np.fmax(self.largest_gap[request.row], gap)
            self._sampled_at[request.row] = self.clock
            request.generated += 1
            if request.generated == self._new[request.row]:
                del self._sampled_at[request.row]
                self.policy.finish(request)
                self.active -= 1
                self.latency[request.row] = self.clock - request.arrival
        for gap, count in gaps.items():
            self.gaps.add(gap, count)


def serve(server: Server, schedule: str, limits: ServerLimits, lengths: Lengths) -> SimulationOutcome:
    """Run all rows through one server.

    Args:
        server: The device.
        schedule: A name in SERVING.
        limits: Of an iteration.
        lengths: The workload.

    Returns:
        The outcome; its S is the token-wise layers, its R the attention.
    """
    memory = KvBlocks(server.capacity, server.block_tokens, server.state_tokens)
    run = _Run(server, SERVING[schedule](limits, memory, server), lengths)
    run.arrive()
    while run.active:
        run.run(run.policy.next(run.clock))
        run.arrive()
    return SimulationOutcome(
        seconds=run.clock,
        rows=len(lengths) - run.refused,
        refused=run.refused,
        tokens=run.tokens,
        steps=run.steps,
        s_seconds=run.s_seconds,
        r_seconds=run.r_seconds,
        peak_load=run.load.peak,
        load=run.load.samples,
        latency=run.latency,
        preemptions=run.policy.preemptions,
        recomputed=run.policy.recomputed,
        swapped=run.swapped,
        gaps=run.gaps,
        largest_gap=run.largest_gap,
    )
