"""Prompts of an iterator: results as they finish, in bounded memory, and nothing left behind when the caller leaves."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import time
import weakref

import pytest

from hpcdecode import LLM, PromptError, RequestOutput, SamplingParams
from hpcdecode.engine.stream import MOST_WAITING
from hpcdecode.errors import UserError

READ_AHEAD = 2 * 4096 + 256  # prompts that are read before they are generated, at most
ROWS = [{"prompt_token_ids": [5 + i * 7] * (1 + i % 9), "max_tokens": 1 + i % 7, "id": f"r{i}"} for i in range(40)]
SAMPLED = SamplingParams(temperature=0.8, seed=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(checkpoint):
    return LLM(checkpoint("llama3"), dtype="float32", batch=8, kv_memory="16M", threads=1)


def endless(read=None):
    for i in itertools.count(1):
        if read is not None:
            read.append(i)
        yield {"prompt_token_ids": [5 + i % 400]}


def engine_threads():
    return [thread for thread in threading.enumerate() if thread.name in ("engine", "row-reader")]


def test_results_are_those_of_a_list_in_the_order_in_which_they_finish(llm):
    expected = llm.generate(ROWS, SAMPLED, use_tqdm=False)
    for results in (llm.generate(iter(ROWS), SAMPLED, use_tqdm=False), llm.generate_iter(ROWS, SAMPLED, False)):
        found = list(results)
        assert [o.request_id for o in found] != [o.request_id for o in expected]  # the short ones come first
        assert sorted(found, key=lambda o: int(o.request_id[1:])) == expected
    assert list(llm.generate_iter([])) == []


def test_texts_chats_and_parameters_of_each(llm):
    prompts = ["a b", {"messages": [{"role": "user", "content": "hello"}]}, [5, 6]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True, n=samples) for n, samples in ((2, 1), (3, 2), (4, 1))]
    found = sorted(llm.generate_iter(prompts, iter(params), use_tqdm=False), key=lambda o: o.request_id)
    assert [o.prompt for o in found] == ["a b", "<s>user: hello\nassistant:", None]
    assert [[len(s.token_ids) for s in o.outputs] for o in found] == [[2], [3, 3], [4]]
    assert found == llm.generate(prompts, params, use_tqdm=False) and found[2].prompt_token_ids == [5, 6]


def test_memory_does_not_grow_with_the_rows(llm):
    read: list[int] = []
    results = llm.generate_iter(endless(read), SamplingParams(max_tokens=1), use_tqdm=False)
    for count in range(1, 601):
        next(results)
        assert len(read) - count <= READ_AHEAD + MOST_WAITING + 8
    gc.collect()
    assert sum(type(o) is RequestOutput for o in gc.get_objects()) < 10
    results.close()


@pytest.mark.parametrize("leave", ["break", "close", "drop", "exception"])
def test_a_caller_that_leaves_leaves_nothing_behind(llm, leave):
    results = llm.generate_iter(endless(), SamplingParams(max_tokens=300, ignore_eos=True), use_tqdm=False)
    if leave == "exception":
        with pytest.raises(KeyError):
            for output in results:
                raise KeyError(output)
        results.close()
    else:
        next(results)
        cache = weakref.ref(llm._engine._attention.kv_cache)
        with pytest.raises(UserError, match="one call at a time"):
            llm.generate("a")
        if leave == "close":
            results.close()
        del results
        gc.collect()
        assert cache() is None
    assert not engine_threads()
    (output,) = llm.generate("a b", SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 3


def test_a_caller_that_is_slow_makes_the_model_wait(llm):
    results = llm.generate_iter(endless(), SamplingParams(max_tokens=1), use_tqdm=False)
    next(results)
    (thread,) = [t for t in engine_threads() if t.name == "engine"]
    thread.join(timeout=1.0)  # long enough for thousands of rows
    assert thread.is_alive()
    waiting = results.gi_frame.f_locals["stream"]._queue.qsize()
    assert waiting == MOST_WAITING
    results.close()
    assert not engine_threads()


def test_prompts_that_cannot_be_used(llm):
    rows = ["a b", "", 7, {"prompt_token_ids": [5] * 5000, "id": "long"}, "c d"]
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    found = {o.request_id: o for o in llm.generate_iter(rows, params, False, errors="yield")}
    assert {name: len(o.outputs) for name, o in found.items()} == {"1": 1, "2": 0, "3": 0, "long": 0, "5": 1}
    assert found["1"].error is None and "expected a string or a dict, got int" in found["3"].error
    assert "prompt too long" in found["long"].error
    with pytest.raises(PromptError, match="prompt 3: expected a string or a dict, got int"):
        list(llm.generate_iter(["a b", "c d", 7], params, False))
    with pytest.raises(PromptError, match="expected one for each prompt, got 1 and more prompts"):
        list(llm.generate_iter(["a", "b"], [params], False))
    with pytest.raises(PromptError, match="expected one for each of 1 prompts, got more"):
        list(llm.generate_iter(["a"], [params, params], False))
    with pytest.raises(UserError, match="errors: expected raise or yield, got 'skip'"):
        llm.generate_iter([], errors="skip")
    with pytest.raises(UserError, match="expected an iterable of prompts, got one prompt: 'a'"):
        llm.generate_iter("a")
    assert not engine_threads()


def test_an_iterator_that_waits_keeps_no_caller(llm):
    go_on = threading.Event()

    def prompts():
        yield from itertools.islice(endless(), 600)
        go_on.wait(60)
        yield "a"

    results = llm.generate(prompts(), SamplingParams(max_tokens=1), use_tqdm=False)
    next(results)
    start = time.monotonic()
    results.close()
    assert time.monotonic() - start < 20 and [t.name for t in engine_threads()] == ["row-reader"]
    (reader,) = engine_threads()
    assert len(llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False)) == 2
    go_on.set()
    reader.join(30)
    assert not engine_threads()


def test_what_the_iterator_raises_is_raised(llm):
    def prompts():
        yield "a b"
        raise LookupError("no more pages")

    with pytest.raises(LookupError, match="no more pages"):
        list(llm.generate_iter(prompts(), SamplingParams(max_tokens=1), False))
    assert len(llm.generate(["a", "b"], SamplingParams(max_tokens=1), use_tqdm=False)) == 2


@pytest.mark.system
def test_python_ends_while_results_are_left(checkpoint):
    code = (
        "import sys, itertools; from hpcdecode import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], dtype='float32', batch=8, kv_memory='16M', threads=1)\n"
        "results = llm.generate(({'prompt_token_ids': [5]} for _ in itertools.count()), use_tqdm=False)\n"
        "print(len(next(results).outputs))"
    )
    line = [sys.executable, "-c", code, str(checkpoint("llama3"))]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
