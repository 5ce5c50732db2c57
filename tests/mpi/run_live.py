"""Run by mpiexec: rows that come while the engine works; each must end as it does alone in one process.

usage: run_live.py MODEL LAYOUT ...

LAYOUT: split, prefill (a rank of a split only prefills), replicas or tp2; one after another, over all ranks.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict

from mpi4py import MPI

from hpcdecode.config import EngineOptions
from hpcdecode.data.prompts.rows import RowError
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.live import LiveDesk, Room, Update
from hpcdecode.mpi.collectives import broadcast
from hpcdecode.ranks.team import assemble
from hpcdecode.ranks.wishes import Wishes
from hpcdecode.report.metrics import Metrics, check_emptied
from hpcdecode.report.progress import NoProgress
from hpcdecode.requests.params import SamplingParams
from hpcdecode.system.signals import Signals

WORLD = MPI.COMM_WORLD
SAMPLED = SamplingParams(temperature=0.8, seed=3, ignore_eos=True)
ROWS = [{"prompt_token_ids": [5 + i * 7] * (1 + i % 9), "max_tokens": 1 + i % 11, "n": 1 + i % 3} for i in range(60)]
LONG = {"prompt_token_ids": [5], "max_tokens": 1500, "ignore_eos": True}


class Client:
    """Submits rows in turns, cancels some, waits for all, and lets the desk drain."""

    def __init__(self):
        self.ends, self.told, self.changed = {}, defaultdict(list), threading.Condition()

    def deliver(self, events):
        with self.changed:
            for event in events:
                if isinstance(event, Update):
                    self.told[event.line, event.sample] += event.token_ids
                else:
                    self.ends[event[0].line if isinstance(event, list) else event.line] = event
            self.changed.notify_all()

    def run(self, desk):
        unwanted = [desk.submit(LONG) for _ in range(3)]
        rows = []
        for i, fields in enumerate(ROWS):
            rows.append(desk.submit(fields, SAMPLED, client=str(i % 3), updates=True))
            if i % 20 == 19:
                time.sleep(0.05)  # all may be idle
        time.sleep(0.05)
        for row in unwanted:
            desk.cancel(row.line)
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.ends) == len(rows) + len(unwanted), 100), len(self.ends)
        assert all(isinstance(self.ends[row.line], RowError) for row in unwanted)
        for row in rows:
            assert all(self.told[row.line, r.sample] == r.token_ids for r in self.ends[row.line])
        self.found = [[r.token_ids for r in self.ends[row.line]] for row in rows]


def serve(model, layout):
    """Return the tokens of all rows, on the lead."""
    tp, prefill = 2 if layout == "tp2" else None, int(layout == "prefill")
    name = {"tp2": "replicas", "prefill": "split"}.get(layout, layout)
    sizes = {"batch": 16, "kv_memory": 1 << 24, "schedule": "fifo", "prefill_ranks": prefill}
    options = EngineOptions(model=model, dtype="float32", layout=name, **sizes)
    team = assemble(None if layout == "alone" else WORLD, Wishes(layout=name, tp=tp, prefill_ranks=prefill))
    engine, stop = Engine(options, team), Signals()
    if not team.lead:
        team.gather_all(engine.work(None, engine.scales(None), stop, NoProgress(), 3600.0), Metrics)
        return None
    client = Client()
    desk = LiveDesk(engine.tokenizer, model, Room.of(engine), client.deliver)
    errors = []

    def run():
        try:
            client.run(desk)
        except BaseException as error:
            errors.append(error)
        desk.drain()

    thread = threading.Thread(target=run)
    thread.start()
    metrics = desk.work(engine, engine.scales(desk), stop)
    thread.join()
    assert not errors, errors
    check_emptied(team.gather_all(metrics, Metrics))
    return client.found


def main(model, *layouts):
    expected = serve(model, "alone") if WORLD.rank == 0 else None
    failures = 0
    for layout in layouts:
        found = serve(model, layout)
        if WORLD.rank == 0:
            differ = sum(a != b for a, b in zip(found, expected, strict=True))
            print(f"LIVE {layout} {len(found)} rows, {differ} differ", flush=True)
            failures += differ
    return int(broadcast(WORLD, failures, int) > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
