"""The desk takes rows back from S-ranks that are lost, and gives them out again with what they had generated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer as Words
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.data.results.result import Result
from hpcdecode.engine import remote
from hpcdecode.engine.desk import Desk, RankReport, result_of
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.requests.sequence import Request, SequenceState


class Written:
    """Results in memory."""

    error_count = 0
    unfinished = list

    def __init__(self):
        self.lines = []

    def add(self, *samples):
        self.lines.append(samples[0].line)

    def tick(self):
        pass


@pytest.fixture
def desk():
    """Six rows, of which five are out."""
    made = Desk([Prompt(line, str(line), [5], SamplingParams()) for line in range(1, 7)], Written(), None)
    for _ in range(5):
        made.pop()
    yield made
    made.feed.close()


def result(line):
    return [Result(line=line, id=str(line), sample=0, text="", finish_reason="stop", prompt_tokens=1, token_ids=[7, 8])]


def rest(desk):
    rows = []
    while desk.peek() is not None:
        rows.append(desk.pop())
    return [(row.line, [u.token_ids for u in row.unfinished]) for row in rows]


def test_the_rows_of_one_s_rank_come_back_and_the_others_stay_out(desk):
    desk.take_back([RankReport(None, [], [], [Unfinished(4, 0, [9, 9])])], {2, 4})
    assert desk.rows_left == 2 and [u.line for u in desk.unfinished()] == [4]
    desk.record(result(3))
    assert rest(desk) == [(2, []), (4, [[9, 9]]), (6, [])]
    for line in (1, 2, 4, 5, 6):
        desk.record(result(line))
    assert sorted(desk.writer.lines) == [1, 2, 3, 4, 5, 6] and desk.rows_left == 0


def test_each_lane_of_a_client_has_whole_documents():
    rows = [(100 * document, document) for document in (1, 2, 3) for _ in range(4)]
    prompts = [Prompt(i, str(i), [start] * 150 + [i], SamplingParams()) for i, (start, _) in enumerate(rows, 1)]
    desk = Desk(prompts, Written(), None)
    clients = remote.Clients(desk, SimpleNamespace(size=3), [8, 8, 8])
    first = clients._rows(1, [3, 3], ahead=False)
    assert [[p.line for p in of_lane] for of_lane in first.prompts] == [[1, 2, 3], [5, 6, 7]]
    other = clients._rows(2, [1, 0], ahead=False)
    assert [[p.line for p in of_lane] for of_lane in other.prompts] == [[9], []]
    again = clients._rows(1, [0, 2], ahead=False)
    assert [[p.line for p in of_lane] for of_lane in again.prompts] == [[], [8, 11]], "half of the longest hand"
    desk.feed.close()


def test_a_report_that_a_lost_s_rank_had_sent_changes_nothing(desk, monkeypatch):
    monkeypatch.setattr(remote.ulfm, "lost", lambda _comm: [1])
    told = []
    clients = remote.Clients(desk, SimpleNamespace(size=3), [4, 4, 4], lambda *lost: told.append(lost))
    clients._held[1] = {2, 4}
    assert clients._dissolve(clients._lost) and told == [(1, 2)]
    clients._take(1, RankReport(None, [result(2)], [], []))
    assert desk.writer.lines == [] and desk.rows_left == 2 and clients.open == {2}
    assert not clients._dissolve(clients._lost)


def test_all_rows_that_are_out_come_back_but_those_that_a_last_report_finishes(desk):
    desk.take_back([RankReport(None, [result(1)], [], []), RankReport(None, [], [], [Unfinished(2, 0, [9])])])
    assert desk.writer.lines == [1] and rest(desk) == [(2, [[9]]), (3, []), (4, []), (5, []), (6, [])]


@pytest.mark.parametrize("skip, shown", [(True, "wellfour"), (False, "[THINK]well[/THINK]four<pad>")])
def test_markers_that_are_special_tokens_split_a_text(skip, shown):
    """They are not in the text that is shown, and other special tokens are in no part of it."""
    special = ["<s>", "<pad>", "[THINK]", "[/THINK]"]
    words = models.WordLevel({word: i for i, word in enumerate([*special, "well", "four"])})
    backend = PreTrainedTokenizerFast(tokenizer_object=Words(words), extra_special_tokens=special)
    backend.chat_template = "{# [THINK] #}"
    tokenizer = Tokenizer(backend, frozenset(), len(backend))
    assert tokenizer.parse_output("auto", "auto") == ("mistral", "none")
    prompt = Prompt(7, "7", [0], SamplingParams(skip_special_tokens=skip))
    sequence = SequenceState(Request(prompt, 9, 0), 0)
    sequence.generated = [2, 4, 3, 5, 1]
    made = result_of(sequence, tokenizer)
    assert made.text.replace(" ", "") == shown
    assert (made.reasoning, made.content.replace(" ", "")) == ("well", "four" if skip else "four<pad>")
