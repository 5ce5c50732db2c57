"""One device, or several that compute as one, with weights and KV cache in their own memory, serving rows as they come.

An iteration takes the token-wise layers of all its tokens, then its attention. Prompts are bound by arithmetic,
decoding by reading the cache; a schedule that packs them has the two at once. What is swapped crosses meanwhile.
"""

from __future__ import annotations

import msgspec
import numpy as np

from hpcdecode.errors import UserError
from hpcdecode.planning.cost import WIDTH, Cost, ModelSize, of_devices
from hpcdecode.planning.hardware import Device
from hpcdecode.planning.lengths import Lengths
from hpcdecode.planning.servers import SERVING
from hpcdecode.planning.servers.base import Iteration, KvBlocks, ServedRequest, ServerLimits, Serving
from hpcdecode.planning.simulator import LoadHistory, Outcome

MEMORY = 0.9  # of the device's, for weights and KV cache: vLLM's gpu_memory_utilization


class Server(msgspec.Struct, frozen=True):
    """capacity: KV tokens; swap: seconds in which the K and V of a token go to the host or come from there."""

    cost: Cost
    capacity: int
    swap: float
    block_tokens: int = 16

    def tokens(self, count: int) -> float:
        return self.cost.body_seconds(count)

    def attention(self, cached: int, count: int) -> float:
        if count == 1:
            return self.cost.attend * (cached + 1)
        return self.cost.prefill * (count * cached + count * (count + 1) // 2)


def of_device(size: ModelSize, device: Device, kv_width: float = WIDTH) -> Server:
    """From its data sheet. UserError where the weights leave no room for a KV cache."""
    if device.memory is None or not device.flops:
        raise UserError(f"S device: expected one with a memory and a rate of products of its own, got {device.name}")
    token_bytes = size.kv_bytes(kv_width)
    capacity = int((MEMORY * device.memory - size.weight_bytes) / token_bytes)
    if capacity < 1:
        raise UserError(
            f"{device.name}: expected room beside {size.weight_bytes / 1e9:,.1f} GB of weights in {MEMORY:.0%} of its "
            f"{device.memory / 1e9:,.0f} GB, got none: take more devices, as in 4x{device.name}"
        )
    cost = of_devices(size, device, device, float("inf"), 0.0, kv_width)
    return Server(cost, capacity, token_bytes / device.host)


class _Run:
    """The requests of a simulation on their way."""

    def __init__(self, server: Server, policy: Serving, lengths: Lengths):
        self.server, self.policy, self.lengths = server, policy, lengths
        self.clock = self.s_seconds = self.r_seconds = 0.0
        self.refused = self.tokens = self.steps = self.swapped = 0
        self.active = 0  # requests that have come and not ended
        self.load = LoadHistory()
        self.latency = np.full(len(lengths), np.nan)
        self._new, self._arrival = lengths.new.tolist(), lengths.arrival.tolist()
        self._next = 0

    def arrive(self) -> None:
        """Those that have come by now; if there is nothing else to do, when the next one comes."""
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
        """Its time, and the tokens that are drawn."""
        drawn = [r for r, n in iteration.work if n == r.left]
        layers = self.server.tokens(sum(n for _, n in iteration.work)) + self.server.cost.logits_seconds(len(drawn))
        packs = iteration.packs
        attention = sum(max(self._kinds(p)) for p in packs) if packs else sum(self._kinds(iteration.work))
        self.clock += max(layers + attention, iteration.swapped * self.server.swap)
        self.s_seconds += layers
        self.r_seconds += attention
        self.swapped += iteration.swapped
        self.steps += 1
        for request, count in iteration.work:
            request.cached += count
        self.load.add(self.clock, sum(r.cached for r, _ in iteration.work))
        self._draw(drawn)

    def _kinds(self, work: list[tuple[ServedRequest, int]]) -> tuple[float, float]:
        """Seconds of the attention of prompts, and of decoding."""
        decoding = [r.cached for r, n in work if n == 1]
        prompts = sum(self.server.attention(r.cached, n) for r, n in work if n > 1)
        return prompts, self.server.cost.attend * (sum(decoding) + len(decoding))

    def _draw(self, drawn: list[ServedRequest]) -> None:
        self.tokens += len(drawn)
        for request in drawn:
            request.generated += 1
            if request.generated == self._new[request.row]:
                self.policy.finish(request)
                self.active -= 1
                self.latency[request.row] = self.clock - request.arrival


def serve(server: Server, schedule: str, limits: ServerLimits, lengths: Lengths) -> Outcome:
    """Run all rows through one server. schedule: a name in SERVING. S is the token-wise layers, R the attention."""
    memory = KvBlocks(server.capacity, server.block_tokens)
    run = _Run(server, SERVING[schedule](limits, memory, server), lengths)
    run.arrive()
    while run.active:
        run.run(run.policy.next(run.clock))
        run.arrive()
    return Outcome(
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
    )
