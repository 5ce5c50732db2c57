"""What a schedule for one device decides, an iteration at a time, and the state that it decides on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(slots=True, eq=False)
class ServedRequest:
    """A row as a device serves it.

    Attributes:
        row: Index of the row.
        prompt: Prompt tokens.
        most: New tokens that it may generate.
        arrival: Seconds.
        generated: Tokens so far.
        cached: Tokens whose K and V are kept: on the device in `blocks`, or on the host if it has no blocks.
        blocks: KV blocks that it holds on the device.
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
        """Return the tokens known so far."""
        return self.prompt + self.generated

    @property
    def left(self) -> int:
        """Return the tokens to run before the next one is sampled; 1 while it decodes."""
        return self.prompt + self.generated - self.cached

    @property
    def swapped(self) -> bool:
        """Return whether its K and V are on the host."""
        return self.cached > 0 and not self.blocks


ScheduledTokens = tuple[ServedRequest, int]  # a request, and how many of the tokens that it has left run


class KvBlocks:
    """KV blocks of the device.

    Args:
        tokens: Room for K and V of so many.
        block_tokens: Tokens of a block.
        state_tokens: That a request's recurrent state counts as.

    Attributes:
        total: Number of blocks.
        free: Blocks that no request holds.
    """

    def __init__(self, tokens: int, block_tokens: int, state_tokens: int = 0):
        self.block_tokens = block_tokens
        self._state_blocks = -(-state_tokens // block_tokens)
        self.total = self.free = tokens // block_tokens

    def blocks(self, tokens: int) -> int:
        """Return how many blocks hold `tokens` tokens of a request, and its state."""
        return -(-tokens // self.block_tokens) + self._state_blocks

    def need(self, request: ServedRequest, tokens: int) -> int:
        """Return how many blocks a request lacks to hold `tokens` tokens."""
        return max(self.blocks(tokens) - request.blocks, 0)

    def take(self, request: ServedRequest, tokens: int) -> None:
        """Give a request the blocks that it lacks to hold `tokens` tokens.

        Raises:
            ValueError: If fewer are free.
        """
        need = self.need(request, tokens)
        if need > self.free:
            raise ValueError(f"expected {need} free KV blocks, got {self.free}")
        self.free -= need
        request.blocks += need

    def give(self, request: ServedRequest) -> None:
        """Free the blocks of a request."""
        self.free += request.blocks
        request.blocks = 0


class Iteration(NamedTuple):
    """What runs next.

    Attributes:
        work: Requests, and how many of the tokens that they have left run.
        swapped: Tokens whose K and V move between device and host meanwhile.
        packs: Parts of `work` that are on the device at once, in order, their prompts' attention beside that of
            decoding; None if attention runs kind by kind.
    """

    work: list[ScheduledTokens]
    swapped: int = 0
    packs: list[list[ScheduledTokens]] | None = None


class Estimate(Protocol):
    """Seconds on the device."""

    def tokens(self, count: int) -> float:
        """Return the seconds of the token-wise layers of `count` tokens."""

    def attention(self, cached: int, count: int) -> float:
        """Return the seconds in which `count` tokens of a request attend to `cached` ones and to each other."""


class ServerLimits(NamedTuple):
    """Limits of an iteration, with vLLM's names; every schedule says which of them it heeds.

    Attributes:
        max_num_seqs: Requests of an iteration.
        max_num_batched_tokens: Prompt tokens of an iteration.
        swap_space: Tokens of requests in flight whose K and V lie on the host, beyond those that the device holds.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    swap_space: float = float("inf")


class Serving(ABC):
    """A schedule of one device: requests wait, first come first served, and run until they end.

    Args:
        limits: Of an iteration.
        memory: The device's KV blocks.
        estimate: Seconds on the device.

    Attributes:
        WATERMARK: Part of the blocks that stays free when a request enters, so that running ones can grow.
        waiting: Requests that have not entered, in order of arrival.
        running: Requests on the device, in order of arrival.
        preemptions: How often a running request lost its blocks.
        recomputed: Tokens whose K and V were given up.
    """

    WATERMARK = 0.0

    def __init__(self, limits: ServerLimits, memory: KvBlocks, estimate: Estimate):
        self.limits, self.memory, self.estimate = limits, memory, estimate
        self.waiting: deque[ServedRequest] = deque()
        self.running: dict[ServedRequest, None] = {}
        self.watermark = int(self.WATERMARK * memory.total)
        self.preemptions = 0
        self.recomputed = 0

    def refuses(self, request: ServedRequest) -> bool:
        """Return whether a request can never run to its end; its last token is not cached."""
        return self.memory.blocks(request.prompt + request.most - 1) > self.memory.total - self.watermark

    def add(self, request: ServedRequest) -> None:
        """Take a request that has arrived."""
        self.waiting.append(request)

    @abstractmethod
    def next(self, now: float) -> Iteration:
        """Return what runs next; it is empty only if there is no request.

        Args:
            now: Seconds.
        """

    def preempt(self, request: ServedRequest) -> None:
        """Decide where K and V of a request go that has lost its blocks, and where it waits."""
        raise NotImplementedError(f"{type(self).__name__} preempts no request")

    def grow(self) -> None:
        """Make room for all known tokens of every request that stays, and preempt the latest arrivals for it."""
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
        """Free a request that has its last token."""
        self.memory.give(request)
        del self.running[request]
