"""Random rows of several samples that share beginnings and go on from earlier runs, and a machine that runs them."""

from __future__ import annotations

from hypothesis import strategies as st

from hpcdecode.attention.shapes import LayerShape
from hpcdecode.config import SCHEDULES
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.schedule.spread import Spread
from tests.support.scheduling import ListFeed, Machine

FAMILIES = {
    "rows": st.lists(  # prompt tokens, max_tokens, positions of the samples' stop tokens, tokens that a run before made
        st.tuples(
            st.integers(1, 90),
            st.integers(1, 60),
            st.lists(st.none() | st.integers(0, 30), min_size=1, max_size=5),
            st.lists(st.integers(0, 12), max_size=5),
            st.tuples(st.integers(0, 2), st.integers(0, 90)),  # how far it begins as others do, and as which
        ),
        min_size=1,
        max_size=20,
    ),
    "shared": st.sampled_from([0, 100, 1000]),
    "prefill_tokens": st.sampled_from([8, 64]),
    "batch": st.integers(4, 12),
    "period": st.integers(1, 20),
    "lanes": st.integers(1, 3),
    "block": st.sampled_from([1, 4, 16]),
    "capacity": st.lists(st.integers(100, 600), min_size=1, max_size=3),
    "spread": st.builds(Spread, st.sampled_from([0, 40]), st.integers(1, 6)),
    "prefix_room": st.sampled_from([0, 60, 1000]),
}
SCHEDULED = {**FAMILIES, "schedule": st.sampled_from(SCHEDULES), "load": st.just(300)}
_SHORT, _FULL = (LayerShape(1, 2, 2, 1, 1.0, window=window) for window in (20, None))
WINDOWED = {  # prompts so long that tokens leave windows
    **SCHEDULED,
    "rows": FAMILIES["rows"].map(lambda rows: [(5 * row[0], *row[1:4], (row[4][0], 5 * row[4][1])) for row in rows]),
    "shared": st.sampled_from([0, 500, 5000]),
    "prefill_tokens": st.sampled_from([40, 320]),
    "block": st.sampled_from([4, 16, 64]),
    "capacity": st.lists(st.integers(500, 3000), min_size=1, max_size=3),
    "load": st.just(1500),
    "shapes": st.sampled_from([(_SHORT, _FULL), (_SHORT, _FULL, _SHORT), (_SHORT,)]),
}


def feed_of(rows):
    """Families as a feed, the tokens that end samples, and how many tokens each sample gets."""
    feed, stops, ends = ListFeed([]), {}, {}
    for line, (length, most, positions, before, (begin, common)) in enumerate(rows, 1):
        ids = ([begin] * common + [100 + line] * length)[:length]
        params = SamplingParams(n=len(positions), max_tokens=most, ignore_eos=True, stop_token_ids=(9,))
        ends |= {(line, i): min(most, most if p is None else p + 1) for i, p in enumerate(positions)}
        stops |= {(line, i, p): 9 for i, p in enumerate(positions) if p is not None}
        made = [[stops.get((line, i, at), 7) for at in range(most)][: ends[line, i]] for i in range(len(positions))]
        earlier = [Unfinished(line, i, made[i][:count]) for i, count in enumerate(before[: len(made)]) if count]
        feed.prompts.append(Prompt(line, str(line), ids, params, earlier))
    return feed, stops, ends


def run_families(rows, block, kind=Machine, **sizes):
    """Run families to their ends; every sample is done once, as long as it should be, and nothing is left."""
    feed, stops, ends = feed_of(rows)
    machine = kind(feed, steps=30, block=block, stops=stops, **sizes).run()
    refused = {line for line, _ in feed.refused}
    assert len(refused) == len(feed.refused)
    done = lengths_of(machine.done)
    assert done == {key: end for key, end in ends.items() if key[0] not in refused}
    machine.require_empty()
    return machine


def drain_families(rows, block, drained, kind=Machine, **sizes):
    """Run families until step `drained`; the samples of rows that are done then are as long as they should be."""
    feed, stops, ends = feed_of(rows)
    machine = kind(feed, steps=30, block=block, stops=stops, drained=drained, **sizes).run()
    assert lengths_of(machine.done).items() <= ends.items()
    for store in machine.stores:
        store.check()
    return machine


def lengths_of(sequences):
    """Number of tokens by line and sample, each of which is there once."""
    lengths = {(s.prompt.line, s.sample): len(s.generated) for s in sequences}
    assert len(lengths) == len(sequences)
    return lengths
