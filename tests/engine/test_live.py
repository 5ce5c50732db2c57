"""Rows that come while the engine works: their results, tokens as they come, turns, bounds, and rows nobody wants."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from hpcdecode import LLM, SamplingParams
from hpcdecode.config import EngineOptions
from hpcdecode.data.prompts.live_feed import LiveFeed
from hpcdecode.data.prompts.rows import RowError
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.live import DeskClosed, DeskFull, LiveDesk, Room, Update
from hpcdecode.errors import RowProblem
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team, assemble
from hpcdecode.report.metrics import check_emptied
from hpcdecode.requests.prompt import Prompt
from hpcdecode.system.signals import Signals

ROWS = [
    {"prompt_token_ids": [5 + i * 7] * (1 + i % 9), "max_tokens": 1 + i % 7, "n": 1 + i % 3, "logprobs": i % 2 or None}
    for i in range(40)
]
SAMPLED = SamplingParams(temperature=0.8, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint("llama3"), dtype="float32", batch=8, kv_memory="16M", threads=1)


class Server:
    """A live desk, the thread of its engine, and what it was told."""

    def __init__(self, engine, **options):
        self.engine, self.events = engine, defaultdict(list)
        self.changed, self.error = threading.Condition(), None
        room = Room.of(self.engine)
        self.desk = LiveDesk(self.engine.tokenizer, self.engine.options.model, room, self._told, **options)
        self.thread = threading.Thread(target=self._work)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.desk.drain()
        self.thread.join(60)
        assert not self.thread.is_alive() and self.error is None, self.error

    def _work(self):
        try:
            self.metrics = self.desk.work(self.engine, self.engine.scales(self.desk), Signals())
            check_emptied([self.metrics])
        except BaseException as error:
            self.error = error

    def _told(self, events):
        with self.changed:
            for event in events:
                line = event[0].line if isinstance(event, list) else event.line
                self.events[line].append(event)
            self.changed.notify_all()

    def ended(self, prompt):
        """Return the last event of a row."""

        def over():
            told = self.events[prompt.line]
            return bool(told) and not isinstance(told[-1], Update)

        with self.changed:
            assert self.changed.wait_for(over, 60)
        return self.events[prompt.line][-1]

    def begun(self, prompt):
        with self.changed:
            assert self.changed.wait_for(lambda: self.events[prompt.line], 60)


def test_results_are_those_of_the_row_alone_and_updates_add_up_to_them(llm):
    expected = [llm.generate(row, SAMPLED, use_tqdm=False)[0] for row in ROWS]
    with Server(llm._engine) as server:
        submitted = {}

        def client(number):
            for i in range(number, len(ROWS), 4):
                submitted[i] = server.desk.submit(ROWS[i], SAMPLED, client=str(number), updates=True)
                time.sleep(0.002 * (i % 3))

        clients = [threading.Thread(target=client, args=(number,)) for number in range(4)]
        for thread in clients:
            thread.start()
        for thread in clients:
            thread.join()
        for i, output in enumerate(expected):
            results = server.ended(submitted[i])
            assert [r.token_ids for r in results] == [o.token_ids for o in output.outputs], i
            tokens, logprobs = defaultdict(list), defaultdict(list)
            for update in server.events[submitted[i].line][:-1]:
                tokens[update.sample] += update.token_ids
                logprobs[update.sample] += update.logprobs.chosen if update.logprobs else []
            assert [tokens[r.sample] for r in results] == [r.token_ids for r in results]
            assert [logprobs[r.sample] for r in results] == [r.logprobs.chosen if r.logprobs else [] for r in results]
        assert server.desk.running == server.desk.queued == 0
    assert not server.desk._told


def test_it_waits_for_rows_and_uses_little_of_a_core(llm):
    with Server(llm._engine) as server:
        server.ended(server.desk.submit(ROWS[0], SAMPLED))
        begun = time.process_time()
        time.sleep(1)
        assert time.process_time() - begun < 0.3
        assert len(server.ended(server.desk.submit(ROWS[1], SAMPLED))) == ROWS[1]["n"]


def test_what_a_row_begins_with_is_kept_for_rows_to_come(llm):
    begin = [7 + i % 50 for i in range(200)]
    these = [{"prompt_token_ids": [*begin, 60 + i], "max_tokens": 5, "logprobs": 0} for i in range(5)]
    expected = [llm.generate(row, SAMPLED, use_tqdm=False)[0].outputs[0] for row in these]
    with Server(llm._engine) as server:
        for row, output in zip(these, expected, strict=True):
            (result,) = server.ended(server.desk.submit(row, SAMPLED))
            assert result.token_ids == output.token_ids
            assert sum(result.logprobs.chosen) == output.cumulative_logprob
    shared = server.metrics.shared_tokens
    assert shared == 3 * 192  # the first is alone, the second makes a prefix


@pytest.fixture(scope="module")
def beginnings(checkpoint):
    """Rows of a few beginnings, some within others, and the results of each alone."""
    draw = np.random.default_rng(5)
    begins = draw.integers(5, 200, (3, 400)).tolist()

    def row():
        begin = begins[draw.integers(3)][: 50 * draw.integers(1, 9)]
        ids = [*begin, *draw.integers(5, 200, 9).tolist()]
        return {"prompt_token_ids": ids, "max_tokens": int(draw.integers(1, 60)), "n": int(draw.integers(1, 3))}

    rows = [row() for _ in range(40)]
    alone = LLM(checkpoint("llama3"), dtype="float32", threads=1)
    return rows, [alone.generate(row, SAMPLED, use_tqdm=False)[0].outputs for row in rows]


@pytest.mark.parametrize("admission", ["reserve", "optimistic"])
def test_prefixes_come_and_go_with_little_room(checkpoint, beginnings, admission):
    """Rows of `beginnings` over two lanes whose KV cache holds three of the longest."""
    rows, expected = beginnings
    options = EngineOptions(
        model=str(checkpoint("llama3")), dtype="float32", batch=8, lanes=2, kv_memory=1 << 20, schedule="fifo"
    )
    engine = Engine(msgspec.structs.replace(options, admission=admission), assemble(None))
    assert engine.team.me.kv_tokens < 3 * 480
    with Server(engine) as server:
        submitted = []
        for i, row in enumerate(rows):
            submitted.append(server.desk.submit(row, SAMPLED, client=str(i % 3)))
            if i % 7 == 0:
                server.ended(submitted[-1])
        for prompt, outputs in zip(submitted, expected, strict=True):
            assert [r.token_ids for r in server.ended(prompt)] == [o.token_ids for o in outputs]
    assert server.metrics.shared_tokens > 1000


def test_rows_that_nobody_wants(llm):
    long = {"prompt_token_ids": [5], "max_tokens": 2000, "ignore_eos": True}
    with Server(llm._engine) as server:
        rows = [server.desk.submit({**long, **more}, updates=not i) for i, more in enumerate([{}, {"beam_width": 3}])]
        rows += [server.desk.submit(long) for _ in range(20)]  # more than are in flight at once
        server.begun(rows[0])
        kept = server.desk.submit(ROWS[3], SAMPLED, client="another")
        for row in rows:
            server.desk.cancel(row.line)
        server.desk.cancel(1 << 20)  # that there never was
        for row in rows:
            error = server.ended(row)
            assert isinstance(error, RowError) and error.reason == "cancelled"
            assert sum(len(e.token_ids) for e in server.events[row.line][:-1]) < 2000
        expected = llm.generate  # of the same engine, once it is free
        found = server.ended(kept)
        server.desk.cancel(kept.line)  # too late
    assert [r.token_ids for r in found] == [o.token_ids for o in expected(ROWS[3], SAMPLED, use_tqdm=False)[0].outputs]


def test_a_row_has_the_room_that_every_group_has():
    ranks = [Rank(rank=i, host="a", cpus=[i], role="SR", kv_tokens=tokens) for i, tokens in enumerate((4096, 1024))]
    setup = SimpleNamespace(block_tokens=16, state_tokens=0, kv_dtype="float32", shapes_of=lambda _: [])
    team = Team(SimpleNamespace(rank=0), ranks)
    engine = SimpleNamespace(options=EngineOptions(model="m"), team=team, setup=setup, max_positions=8192)
    room = Room.of(engine)
    assert room.tokens == 1024 and room.most_new(100, 1) == 1024 - 16 - 100


def test_what_cannot_be_used_and_what_has_no_room(llm):
    with Server(llm._engine) as server:
        for row, reason in (
            ({"prompt": "a", "temperature": -1}, "temperature: expected"),
            ({}, "expected exactly one of prompt"),
            ({"prompt_token_ids": [1 << 30]}, "expected token ids"),
        ):
            with pytest.raises(RowProblem, match=reason):
                server.desk.submit(row)
        room = server.desk.room
        unbounded = server.desk.submit({"prompt_token_ids": [5, 6]})
        assert unbounded.params.max_tokens == min(room.positions, room.tokens - room.footprint.block_tokens) - 2
        assert isinstance(server.ended(unbounded), list)
        large = {"prompt_token_ids": [5] * 9, "n": 64, "max_tokens": 2000}
        assert "n: expected at most 8" in server.ended(server.desk.submit(large)).reason


def test_as_many_rows_wait_as_may_and_none_after_the_end(llm):
    server = Server(llm._engine, most_waiting=3)
    rows = [server.desk.submit(ROWS[i]) for i in range(3)]
    with pytest.raises(DeskFull):
        server.desk.submit(ROWS[3])
    server.desk.drain()
    with pytest.raises(DeskClosed):
        server.desk.submit(ROWS[3])
    with server:
        assert all(isinstance(server.ended(row), list) for row in rows)


def test_an_engine_that_fails_ends_all_rows(llm, monkeypatch):
    server = Server(llm._engine)
    row = server.desk.submit({"prompt_token_ids": [5], "max_tokens": 2000, "ignore_eos": True}, updates=True)
    monkeypatch.setattr(server.desk, "sampled", lambda _: 1 / 0)
    server.thread.start()
    assert "division by zero" in server.ended(row).reason
    server.thread.join(60)
    assert isinstance(server.error, ZeroDivisionError)


def test_clients_take_turns():
    feed = LiveFeed(100)
    for line, client in enumerate("aaaabbc", 1):
        feed.put(Prompt(line, str(line), [1], SamplingParams()), client)
    assert feed.peek().line == 1 and feed.left == 7
    taken = [feed.pop() for _ in range(3)]
    assert [p.line for p in taken] == [1, 5, 7]
    feed.give_back(taken[:2])
    assert feed.remove(6).line == 6 and feed.remove(6) is None
    order = []
    while (prompt := feed.peek()) is not None:
        assert feed.pop() is prompt
        order.append(prompt.line)
    assert order == [1, 5, 2, 3, 4]
