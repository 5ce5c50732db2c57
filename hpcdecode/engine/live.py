"""A desk that rows come to while the engine works, and that tells what they generate token by token."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec

from hpcdecode.attention.footprint import Footprint
from hpcdecode.data.prompts.feed import PromptQueue
from hpcdecode.data.prompts.given import read_prompt
from hpcdecode.data.prompts.live_feed import DeskClosed, DeskFull, LiveFeed
from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.data.results.result import Result
from hpcdecode.engine.desk import Desk
from hpcdecode.engine.scale import Scale, capacity_of
from hpcdecode.engine.setup import footprint_of
from hpcdecode.errors import first_line
from hpcdecode.report.metrics import Metrics
from hpcdecode.report.progress import Progress
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.requests.sequence import CANCELLED, SequenceState
from hpcdecode.requests.updates import Update, updates_of
from hpcdecode.system.signals import Signals

if TYPE_CHECKING:
    from hpcdecode.engine.engine import Engine

__all__ = ["DeskClosed", "DeskFull", "Event", "LiveDesk", "Room", "Update"]


STOPPED, FAILED = "the server has stopped", "the engine has failed"  # begins of reasons why rows have no results
UNBOUNDED = (1 << 31) - 1  # max_tokens of rows that do not state theirs
_CHECKPOINT_SECONDS = 3600.0  # nothing is kept of rows in flight
_LOAD_SECONDS = 0.1


Event = Update | list[Result] | RowError  # of a row: new tokens; its end, with all samples; its end without any


@dataclasses.dataclass(frozen=True)
class Room:
    """What a row may take.

    Attributes:
        positions: Of the model.
        tokens: Of the largest R-rank's KV cache, in the group that has least: any group may get the row.
        footprint: What a sequence takes of it.
    """

    positions: int
    tokens: int
    footprint: Footprint

    @classmethod
    def of(cls, engine: Engine) -> Room:
        """Return what a row may take of an engine's model and KV caches."""
        options, team = engine.options, engine.team
        tokens = min(max(capacity_of(options, team, group)) for group in team.groups)
        footprint = footprint_of(options, team, team.group, engine.setup)
        return cls(engine.max_positions, tokens, footprint)

    def most_new(self, prompt_tokens: int, samples: int) -> int:
        """Return how many tokens each of a row's samples may generate at most, at least 1."""
        longest = self.footprint.longest(self.tokens // samples) - self.footprint.block_tokens
        return max(min(self.positions, longest) - prompt_tokens, 1)


class _Events:
    """Writer of a live desk: what happens to rows is told once a step, in the engine's thread."""

    def __init__(self, deliver: Callable[[list[Event]], None]):
        self.error_count = 0
        self.unfinished: Callable[[], list[Unfinished]] = list
        self._deliver, self._events = deliver, list[Event]()

    def add(self, *samples: Result) -> None:
        self.put(sorted(samples, key=lambda r: r.sample))

    def error(self, e: RowError) -> None:
        self.error_count += 1
        self.put(e)

    def put(self, event: Event) -> None:
        self._events.append(event)

    def tick(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)


class LiveDesk(Desk):
    """A desk to which any thread may bring rows while the engine works.

    Args:
        tokenizer: Of the model.
        model: Its directory, which requests may name.
        room: What a row may take.
        deliver: Is told what happens to rows, in the order in which it happens, in the engine's thread. It must not
            wait. Each row ends with one list of results, or one RowError.
        most_waiting: Rows that may wait at once.
        adapters: Names of the adapters that rows may choose.
    """

    live = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: str,
        room: Room,
        deliver: Callable[[list[Event]], None],
        most_waiting: int = 4096,
        adapters: Sequence[str] = (),
    ):
        self._model, self.room, self._adapters = model, room, adapters
        self.events = _Events(deliver)
        self._queue = LiveFeed(most_waiting)
        super().__init__((), self.events, tokenizer)
        self.sampled = self._sampled
        self._reading = threading.Lock()
        self._lines = count(1)
        self._cancelled: set[int] = set()
        self._told: dict[tuple[int, int], int] = {}  # tokens that were told, by row and sample
        self.load = 0  # tokens in KV caches, of rows in flight
        self.tokens = 0  # that were generated, those of rows in flight, too

    def submit(
        self,
        fields: dict[str, Any],
        defaults: SamplingParams | None = None,
        *,
        client: str = "",
        drawn_as: int = 1,
        score: bool = False,
        updates: bool = False,
        named: Callable[[Prompt], None] | None = None,
    ) -> Prompt:
        """Read a row and queue it; its `line` names it from now on.

        Args:
            fields: Those of a row of a prompt file, or of a request of the OpenAI batch format. Without max_tokens it
                generates what there is room for.
            defaults: Sampling parameters that the fields replace.
            client: Who asks; clients take turns.
            drawn_as: Line whose random numbers are drawn: results are those of that row of a file.
            score: The row is scored.
            updates: Tell its tokens as they come.
            named: Is told the row before anything can happen to it; it may be refused yet.

        Raises:
            RowProblem: The row cannot be used.
            DeskFull: Too many rows wait.
            DeskClosed: No more rows are taken.
        """
        if self._queue.ended:
            raise DeskClosed
        with self._reading:
            prompt = self._read(fields, defaults or SamplingParams(max_tokens=UNBOUNDED), score)
        prompt.drawn_as, prompt.updates = drawn_as, updates
        if named is not None:
            named(prompt)
        self._queue.put(prompt, client)
        return prompt

    def cancel(self, line: int) -> None:
        """Drop a row: one that waits is not started, one in flight ends with its next token."""
        self._cancelled.add(line)

    def drain(self) -> None:
        """Take no more rows; the engine ends when all are done."""
        self._queue.end()

    @property
    def closed(self) -> bool:
        """Return whether no more rows are taken."""
        return self._queue.ended

    @property
    def queued(self) -> int:
        """Return the number of rows that wait."""
        return self._queue.queued

    @property
    def running(self) -> int:
        """Return the number of rows in flight."""
        return len(self._out)

    def exhausted(self) -> bool:
        """Return whether there are no more prompts, and none may come."""
        return self._queue.ended and self.feed.peek() is None

    def tell(self, updates: Iterable[Update]) -> None:
        """Tell new tokens, each once: a row that was taken back may make some of its tokens again."""
        for update in updates:
            key = update.line, update.sample
            if update.line in self._out and (new := update.after(self._told.get(key, 0))):
                self._told[key] = new.begin + len(new.token_ids)
                self.events.put(new)

    def take_cancelled(self) -> Iterable[int]:
        """Drop rows that wait and were cancelled; return those that are in flight."""
        if not self._cancelled:
            return ()
        lines = set(self._cancelled)
        self._cancelled -= lines
        running = lines & self._out.keys()
        for line in lines - running:
            if (prompt := self._queue.remove(line)) is not None:
                self.error(RowError(line, prompt.id, CANCELLED))
        return running

    def work(self, engine: Engine, scales: list[Scale], stop: Signals) -> Metrics:
        """Let an engine work on the rows until `drain` was called and all are done, or `stop` says so.

        Rows that are left then end with an error. Other ranks call `engine.work` without a desk meanwhile.

        Args:
            engine: Whose model and KV caches are used.
            scales: What `engine.scales` returned for this desk.
            stop: Signals of this process.

        Returns:
            What this rank counted.

        Raises:
            Exception: What ended the engine's work; the rows have ended, too.
        """
        reason = STOPPED
        try:
            return engine.work(self, scales, stop, _Load(self), _CHECKPOINT_SECONDS)
        except BaseException as error:
            reason = f"{FAILED}: {first_line(error)}"
            raise
        finally:
            self.fail_all(reason)

    def fail_all(self, reason: str) -> None:
        """End all rows that are left with an error, once the engine works no more."""
        self.drain()
        while (prompt := self.peek()) is not None:
            self.refuse(prompt, reason)
        for prompt in list(self._out.values()):
            self.error(RowError(prompt.line, prompt.id, reason))
        self.events.tick()

    def _open_feed(self, rows: Iterable[Prompt | RowError], size: Callable[[int], int] | None) -> PromptQueue:
        return self._queue

    def _read(self, fields: dict[str, Any], defaults: SamplingParams, score: bool) -> Prompt:
        line, positions = next(self._lines), self.room.positions
        found = read_prompt(
            line,
            fields,
            defaults,
            self.tokenizer,
            positions,
            model=self._model,
            score=score,
            adapters=self._adapters,
        )
        if found.params.max_tokens == UNBOUNDED:
            most = self.room.most_new(len(found.token_ids), found.params.samples)
            found.params = msgspec.structs.replace(found.params, max_tokens=most)
        return found

    def _sampled(self, sequences: Sequence[SequenceState]) -> None:
        self.tell(updates_of(sequences))

    def _returned(self, line: int) -> None:
        prompt = self._out.get(line)
        super()._returned(line)
        if prompt is not None and prompt.updates:
            for sample in range(prompt.params.samples):
                self._told.pop((line, sample), None)


class _Load(Progress):
    """Keeps a desk's `load`."""

    def __init__(self, desk: LiveDesk):
        super().__init__(bar=False)
        self._desk, self._last_load = desk, 0.0

    def due(self) -> bool:
        return perf_counter() - self._last_load > _LOAD_SECONDS

    def update(self, rows: int, tokens: int, in_flight: int, finished: tuple[int, int] = (0, 0)) -> None:
        self._desk.load, self._desk.tokens, self._last_load = in_flight, tokens, perf_counter()
