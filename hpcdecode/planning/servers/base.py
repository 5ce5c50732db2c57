"""What a schedule for one device decides, an iteration at a time, and the state that it decides on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(slots=True, eq=False)
class ServedRequest:
    """A row as a device serves it. prompt: tokens; most: new tokens that it may generate; arrival: seconds.

    cached: tokens whose K and V are kept, on the device in `blocks` or, where it has none, on the host.
    """

    row: int
    prompt: int
    most: int
    arrival: float
    generated: int = 0
    cached: int = 0
    blocks: int = 0

    @property
    def length(self) -> int:
        """Tokens known so far."""
        return self.prompt + self.generated

    @property
    def left(self) -> int:
        """Tokens to run before it draws the next one; 1 while it decodes."""
        return self.prompt + self.generated - self.cached

    @property
    def swapped(self) -> bool:
        return self.cached > 0 and not self.blocks


class KvBlocks:
    """KV blocks of the device. ValueError where more are taken than are free."""

    def __init__(self, tokens: int, block_tokens: int):
        self.block_tokens = block_tokens
        self.total = self.free = tokens // block_tokens

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def need(self, request: ServedRequest, tokens: int) -> int:
        """Blocks that a request lacks to hold so many tokens."""
        return max(self.blocks(tokens) - request.blocks, 0)

    def take(self, request: ServedRequest, tokens: int) -> None:
        need = self.need(request, tokens)
        if need > self.free:
            raise ValueError(f"expected {need} free KV blocks, got {self.free}")
        self.free -= need
        request.blocks += need

    def give(self, request: ServedRequest) -> None:
        self.free += request.blocks
        request.blocks = 0


class Iteration(NamedTuple):
    """work: requests, and how many of the tokens that they have left run. swapped: tokens whose K and V move between
    device and host meanwhile. packs: where given, the parts of `work` whose attention runs at once, in order."""

    work: list[tuple[ServedRequest, int]]
    swapped: int = 0
    packs: list[list[tuple[ServedRequest, int]]] | None = None


class Estimate(Protocol):
    """Seconds on the device."""

    def tokens(self, count: int) -> float:
        """Of the token-wise layers."""

    def attention(self, cached: int, count: int) -> float:
        """Of so many tokens of a request to those cached and to each other."""


class ServerLimits(NamedTuple):
    """Of an iteration, with vLLM's names; a schedule says which of them it heeds."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Serving:
    """Requests wait, first come first served, and run until they end.

    WATERMARK: part of the blocks that stays free when a request enters, for those there to grow.
    """

    WATERMARK = 0.0

    def __init__(self, limits: ServerLimits, memory: KvBlocks, estimate: Estimate):
        self.limits, self.memory, self.estimate = limits, memory, estimate
        self.waiting: deque[ServedRequest] = deque()
        self.running: dict[ServedRequest, None] = {}  # on the device, in order of arrival
        self.watermark = int(self.WATERMARK * memory.total)
        self.preemptions = 0
        self.recomputed = 0  # tokens whose K and V were given up

    def refuses(self, request: ServedRequest) -> bool:
        """Whether it can never run to its end: the last token of all is not cached."""
        return self.memory.blocks(request.prompt + request.most - 1) > self.memory.total - self.watermark

    def add(self, request: ServedRequest) -> None:
        self.waiting.append(request)

    def next(self, now: float) -> Iteration:
        """What runs next; nothing only if there is no request. now: seconds."""
        raise NotImplementedError

    def preempt(self, request: ServedRequest) -> None:
        """It no longer runs, and its blocks are free: where its K and V go, and where it waits."""
        raise NotImplementedError

    def grow(self) -> None:
        """Room for all known tokens of every request that stays; the latest arrivals are preempted for it."""
        for request in list(self.running):
            while request in self.running and self.memory.need(request, request.length) > self.memory.free:
                latest, _ = self.running.popitem()
                self.memory.give(latest)
                self.preemptions += 1
                self.preempt(latest)
            if request not in self.running:
                break  # nor are those behind it
            self.memory.take(request, request.length)

    def finish(self, request: ServedRequest) -> None:
        """It has drawn its last token."""
        self.memory.give(request)
        del self.running[request]
