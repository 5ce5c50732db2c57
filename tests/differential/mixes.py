"""Random jobs for the differential test: rows that mix all features, and the runs that bring them to their end.

A mix is plain data, so that it can be stored, sent to other ranks and run again:

    model: "demo", or the name of another model that the test was given
    rows: fields of each line of the prompt file
    flags: sampling fields of rows that do not have them
    kv_dtype: of the KV cache, where it is not the activations'
    score: true if rows are scored and nothing is generated
    runs: the first to last run of one job. Each but the last is interrupted, `stop` polls after its first step;
        with `crash` what it left behind at that moment is all that the next run finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.support.guessing import GUESSES

CONTEXT = 2048  # of the demo model, and most that is used of another
LONGEST_NEW = 24
FUSES = ("always", "never", "now and then")
LEAST_KV = 2752  # tokens of an R-rank's KV cache that hold any row
MOST_RANKS = 4
WORDS = ("def ", "return", " the", "class", "\n", "    ", " of", " a", "self", "(x):", "import", " list", ".", " is")
TEXTS = (
    "The with statement",
    "def fibonacci(n):\n",
    "Once",
    "A decorator is a function that",
    "import os\n\nclass Reader:\n    def read(self",
    "é😀 ü",
)


def text_of(number: int, words: int) -> str:
    """A text of so many words, another one for each number."""
    return "".join(WORDS[(i * number + i * i // 7) % len(WORDS)] for i in range(words))


HEADERS = tuple(text_of(1, words) for words in (200, 260, 300))  # they differ in the last KV block of what others share
CHATS = ("What is a list?", "Name two colours.", "Hi")
STRUCTURES = (
    {"choice": ["yes", "no", "perhaps"]},
    {"regex": "[0-9]{1,6}"},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
)


def mixes(
    model: str = "demo", chat: bool = False, most_rows: int = 12, adapters: Sequence[str] = ()
) -> st.SearchStrategy[dict[str, Any]]:
    """Draw mixes.

    Args:
        model: its name.
        chat: whether it has a chat template.
        most_rows: of a mix.
        adapters: names of adapters, of which rows may choose one.
    """
    any_row, one_alike = choosing(rows(chat), adapters), choosing(alike(), adapters)
    return st.fixed_dictionaries(
        {
            "model": st.just(model),
            "rows": st.one_of(
                st.lists(any_row, min_size=1, max_size=most_rows // 2),
                st.lists(any_row, min_size=most_rows // 2, max_size=most_rows),
                st.lists(st.one_of(one_alike, one_alike, any_row), min_size=most_rows // 2, max_size=most_rows),
            ),
            "flags": st.fixed_dictionaries(
                {"max_tokens": st.integers(1, LONGEST_NEW), "temperature": st.sampled_from((0.0, 0.0, 0.7))},
                optional={"n": st.integers(2, 3), "logprobs": st.integers(0, 3), "stop": st.just(["the"])},
            ),
            "runs": _all_runs(),
        }
    )


def scored_mixes(
    model: str = "demo", chat: bool = False, most_rows: int = 12, adapters: Sequence[str] = ()
) -> st.SearchStrategy[dict[str, Any]]:
    """Draw mixes of rows that are scored; the arguments are those of `mixes`."""
    given = choosing(st.one_of(scored(chat), scored(chat), choices_after_headers()), adapters)
    return st.fixed_dictionaries(
        {
            "model": st.just(model),
            "score": st.just(True),
            "rows": st.lists(given, min_size=1, max_size=most_rows),
            "flags": st.fixed_dictionaries({"max_tokens": st.just(1)}, optional={"logprobs": st.integers(0, 3)}),
            "runs": _all_runs(),
        }
    )


def _all_runs() -> st.SearchStrategy[list[dict[str, Any]]]:
    return st.lists(_interrupted(), max_size=3).flatmap(
        lambda before: runs().map(lambda last: [*before, {**last, "stop": None, "crash": False}])
    )


def _interrupted() -> st.SearchStrategy[dict[str, Any]]:
    stops = {"stop": st.integers(0, 60), "crash": st.booleans()}
    return st.tuples(runs(), st.fixed_dictionaries(stops)).map(lambda parts: parts[0] | parts[1])


def runs() -> st.SearchStrategy[dict[str, Any]]:
    """Draw how a job is run: none of it may change a row."""
    return st.fixed_dictionaries(
        {
            "ranks": st.sampled_from((1, 1, 2, 3, 4)),
            "batch": st.sampled_from((8, 9, 12, 16, 24, 40)),
            "kv_tokens": st.sampled_from((LEAST_KV, LEAST_KV, 4 * LEAST_KV, 64 << 10)),
        },
        optional={
            "layout": st.sampled_from(("replicas", "replicas", "split")),
            "s_ranks": st.just(2),  # of more than two ranks that are split
            "pp": st.sampled_from((2, 2, 3)),  # of as many ranks or a multiple
            "pools": st.just("own"),
            "route": st.just("rotational"),  # of split runs with several S-ranks
            "exchange": st.just("collective"),
            "period": st.integers(1, 12),
            "lanes": st.integers(1, 3),
            "prefill_tokens": st.sampled_from((7, 16, 64, 300)),
            "partition": st.just("head"),
            "overlap": st.integers(2, 3),
            "schedule": st.sampled_from(("load-control", "static", "fifo")),
            "prefix_sharing": st.sampled_from((True, True, False)),
            "admission": st.just("optimistic"),
            "preempts": st.sampled_from((0.0, 0.1, 0.5)),  # how hastily, of optimistic runs
            "tiers": st.sampled_from(("host", "file", "torn")),  # for what leaves, of optimistic runs
            "rotates": st.sampled_from(("host", "file")),  # tiers of KV caches larger than memory, where that goes
            "fuses": st.sampled_from(FUSES),  # which steps that only decode are one native call, where that goes
            "guesses": st.sampled_from(GUESSES),  # of tokens ahead, of models that can drop them again
            "prefill_ranks": st.integers(1, 2),  # of runs that are split as far as that goes
        },
    )


def rows(chat: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Draw the fields of a line, bad ones now and then."""
    sources = [prompts(), prompts(), token_ids()] + [chats()] * chat
    asked = st.one_of(sampling(), sampling(), scored_samples())
    parts = (st.one_of(*sources), asked, st.one_of(st.just({}), st.just({}), beams(), bad()))
    return st.tuples(*parts).map(lambda p: p[0] | (p[2] if "beam_width" in p[2] else p[1] | p[2]))


def choosing(fields: st.SearchStrategy[dict[str, Any]], adapters: Sequence[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw fields of which most choose one of some adapters, if there are any, and some one that there is not."""
    if not adapters:
        return fields
    known = [{"lora": name} for name in adapters]
    choices = st.sampled_from([{}, {}, {"lora": None}, *known, *known, {"lora": "unknown"}])
    return st.tuples(fields, choices).map(lambda both: both[0] | both[1])


def prompts() -> st.SearchStrategy[dict[str, Any]]:
    """Draw texts, many of which begin alike."""
    few = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)
    words = st.one_of(few, st.integers(1, 9).map(lambda number: text_of(number, 110)))
    header = st.one_of(st.just(""), st.sampled_from(HEADERS))
    parts = st.tuples(header, st.sampled_from(TEXTS), words)
    return parts.map(lambda p: {"prompt": "".join(p)})


def alike() -> st.SearchStrategy[dict[str, Any]]:
    """Draw the fields of a line that may share a prefix, and shows it if that is not its own."""
    texts = st.tuples(st.sampled_from(HEADERS), st.sampled_from(TEXTS[:3]), st.integers(1, 9))
    prompt = texts.map(lambda p: p[0] + p[1] + text_of(p[2], 110))
    some = {"n": st.integers(2, 3), "temperature": st.just(0.8), "max_tokens": st.integers(1, 6)}
    return st.fixed_dictionaries({"prompt": prompt, "logprobs": st.integers(0, 2)}, optional=some)


def token_ids() -> st.SearchStrategy[dict[str, Any]]:
    """Draw prompts by length: from one token to the context, mostly short."""
    short, longest = st.one_of(st.integers(1, 6), st.integers(1, 20)), st.sampled_from((1, CONTEXT - 30, CONTEXT - 1))
    lengths = st.one_of(short, st.integers(1, 80), st.integers(100, 400), longest)
    return st.tuples(lengths, st.integers(1, 8)).map(
        lambda p: {"prompt_token_ids": [5 + (i * p[1] + i * i // 7) % 1900 for i in range(p[0])]}
    )


def chats() -> st.SearchStrategy[dict[str, Any]]:
    """Draw conversations."""
    return st.lists(st.sampled_from(CHATS), min_size=1, max_size=3).map(
        lambda said: {
            "messages": [
                {"role": "user" if i % 2 == len(said) % 2 - 1 or len(said) == 1 else "assistant", "content": text}
                for i, text in enumerate(said)
            ][-1:]
        }
    )


def sampling() -> st.SearchStrategy[dict[str, Any]]:
    """Draw sampling fields; most rows have few of them."""
    fields = {
        "n": st.integers(1, 4),
        "max_tokens": st.integers(1, LONGEST_NEW),
        "min_tokens": st.integers(0, 1),
        "temperature": st.sampled_from((0.0, 0.3, 0.8, 1.5)),
        "top_k": st.sampled_from((1, 5, 50)),
        "top_p": st.sampled_from((0.5, 0.9)),
        "min_p": st.sampled_from((0.05, 0.3)),
        "presence_penalty": st.sampled_from((-1.0, 0.5)),
        "frequency_penalty": st.sampled_from((0.5, 1.5)),
        "repetition_penalty": st.sampled_from((1.2, 0.8)),
        "logit_bias": st.dictionaries(st.integers(0, 60).map(str), st.sampled_from((-100.0, 3.0, 5.0)), max_size=4),
        "bad_words": st.lists(st.sampled_from((" the", "return", "self.")), min_size=1, max_size=2),
        "seed": st.integers(0, 5),
        "ignore_eos": st.just(True),
        "stop_token_ids": st.lists(st.integers(5, 60), max_size=8),
        "stop": st.lists(st.sampled_from(("\n", ".", "e", "the", "s a", "):")), min_size=1, max_size=3),
        "include_stop_str_in_output": st.just(True),
        "skip_special_tokens": st.just(False),
        "truncate_prompt_tokens": st.sampled_from((1, 5, 40, -1)),
        "structured_outputs": st.sampled_from(STRUCTURES),
        "logprobs": st.integers(0, 5),
        "prompt_logprobs": st.integers(0, 3),
    }
    some = st.lists(st.sampled_from(sorted(fields)), max_size=5, unique=True)
    return some.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names}))


def scored(chat: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Draw the fields of a line that is scored: texts, beyond the context too, continuations, choices and bad ones."""
    texts = st.lists(st.sampled_from((" the list", "return", " self.x", "\n", " a")), min_size=1, max_size=3)
    ids = st.lists(st.lists(st.integers(5, 1900), min_size=1, max_size=4), min_size=1, max_size=3)
    lengths = st.sampled_from((2, 9, 300, CONTEXT, CONTEXT + 1, CONTEXT + 400))
    long = lengths.map(lambda n: {"prompt_token_ids": [5 + (i * 3 + i * i // 7) % 1900 for i in range(n)]})
    of_texts = st.tuples(st.one_of(prompts(), *[chats()] * chat), texts.map(lambda t: {"continuations": t}))
    of_ids = st.tuples(st.one_of(prompts(), token_ids()), ids.map(lambda t: {"continuation_token_ids": t}))
    tokens = st.lists(st.integers(5, 1900), min_size=1, max_size=5)
    of_tokens = st.tuples(st.one_of(prompts(), token_ids()), tokens.map(lambda t: {"logprob_token_ids": t}))
    whole = st.one_of(prompts(), long).map(lambda p: (p, {}))
    few = {"truncate_prompt_tokens": st.sampled_from((5, 40, -1)), "logprobs": st.integers(0, 2)}
    more = st.one_of(st.just({}), st.fixed_dictionaries({}, optional=few), st.just({"continuation": 7}))
    return st.tuples(st.one_of(of_texts, of_ids, of_tokens, whole), more).map(lambda p: p[0][0] | p[0][1] | p[1])


def choices_after_headers() -> st.SearchStrategy[dict[str, Any]]:
    """Draw lines whose continuations share a prefix with one another and with those of other lines."""
    prompt = st.tuples(st.sampled_from(HEADERS), st.sampled_from(TEXTS[:3])).map("".join)
    texts = st.lists(st.integers(1, 9).map(lambda n: text_of(n, 6)), min_size=2, max_size=5)
    return st.fixed_dictionaries({"prompt": prompt, "continuations": texts}, optional={"logprobs": st.integers(0, 2)})


def scored_samples() -> st.SearchStrategy[dict[str, Any]]:
    """Draw several samples beside the log-probabilities of the prompt."""
    return st.fixed_dictionaries(
        {"n": st.integers(2, 4), "prompt_logprobs": st.integers(0, 1)},
        optional={"temperature": st.just(0.9), "logprobs": st.just(0), "max_tokens": st.integers(1, 6)},
    )


def beams() -> st.SearchStrategy[dict[str, Any]]:
    """Draw the fields of a beam search, which stand alone."""
    neutral = {"n": 1, "temperature": 0.0}
    return st.fixed_dictionaries(
        {"beam_width": st.integers(2, 4), "max_tokens": st.integers(1, 12)},
        optional={"length_penalty": st.sampled_from((0.0, 2.0)), "ignore_eos": st.just(True)},
    ).map(lambda fields: neutral | fields)


def bad() -> st.SearchStrategy[dict[str, Any]]:
    """Draw what makes a row unusable."""
    return st.sampled_from(({"temperature": -1}, {"top_p": 7}, {"stop": [""]}, {"max_tokens": 0}, {"n": "two"}))
