"""A finished sequence, and the conversion of many of them to the columns of a results file."""

from __future__ import annotations

from math import nan

import msgspec
import numpy as np

from hpcdecode.data.prompts.columns import json_object
from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.inputs import InputColumns
from hpcdecode.data.results.layout import ADAPTER, FINISH_REASONS, INPUTS, PACKED, PROMPTS, TOKENS, Table, shown_name
from hpcdecode.data.results.strings import objects, utf8
from hpcdecode.requests.logprobs import Logprobs, columns_of
from hpcdecode.requests.output_parser import ToolCall
from hpcdecode.requests.shortcuts import NO_SHORTCUTS, Shortcuts

BYTES_PER_VALUE = 16  # of packed columns that weigh as much as a value, which takes more time to write


class Result(msgspec.Struct, array_like=True):
    """A finished sequence, or a scored continuation or text, which an S-rank sends to the writer of the results.

    Attributes:
        line: Line of the prompt file, counted from 1.
        id: The row's id.
        sample: Number of the sample, counted from 0.
        text: Generated text.
        finish_reason: `stop` or `length`.
        prompt_tokens: Number of tokens of the prompt.
        token_ids: Generated tokens.
        queued_at: Unix time at which prefill began.
        first_token_at: Unix time of the first generated token.
        finished_at: Unix time of the last generated token.
        logprobs: Log-probabilities of `token_ids`; None if the row did not ask for them.
        cumulative_logprob: Their sum; NaN if the row did not ask for them.
        prompt_token_ids: Tokens of the prompt; empty without `prompt_logprobs`.
        prompt_logprobs: Log-probabilities of the prompt's tokens; None if the row did not ask for them.
        resumed: Number of generated tokens that an earlier run has generated. It is not in the file.
        columns: Input columns of the row, packed; only the writer sets it.
        reasoning: What the model thought, a part of its text; None, as the next two, if texts are left whole.
        content: What it said.
        tool_calls: The calls of tools in it, in the form of the OpenAI API.
        perplexity: Of `token_ids`, if they were scored; else NaN.
        is_greedy: Whether greedy decoding would take them; None if they were not scored.
        is_best: Whether no other continuation of the row has a greater sum, and none before it an equal one; likewise.
        adapter: Name of the adapter that the row chose; empty for none.
        shortcuts: What the row was spared, all samples together. It depends on other rows, and is not in the file.
    """

    line: int
    id: str
    sample: int
    text: str
    finish_reason: str
    prompt_tokens: int
    token_ids: list[int]
    queued_at: float = 0.0
    first_token_at: float = 0.0
    finished_at: float = 0.0
    logprobs: Logprobs | None = None
    cumulative_logprob: float = nan
    prompt_token_ids: list[int] = []
    prompt_logprobs: Logprobs | None = None
    resumed: int = 0
    columns: bytes = b""
    reasoning: str | None = None
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    perplexity: float = nan
    is_greedy: bool | None = None
    is_best: bool | None = None
    adapter: str = ""
    shortcuts: Shortcuts = NO_SHORTCUTS

    @property
    def weight(self) -> int:
        """Number of values in the file that belong to its tokens, ids and log-probabilities, and to its columns."""
        held = [x for x in (self.logprobs, self.prompt_logprobs) if x is not None]
        values = len(self.token_ids) + sum(len(x) * (1 + 2 * x.width) for x in held)
        return values + len(self.columns) // BYTES_PER_VALUE


def table_of(rows: list[Result], errors: list[RowError]) -> Table:
    """Return the columns of rows, sorted by line and sample, and of errors, sorted by line."""
    rows = sorted(rows, key=lambda r: (r.line, r.sample))
    errors = sorted(errors, key=lambda e: e.line)
    generated = [(len(r.token_ids), r.logprobs) for r in rows]
    prompts = [(len(r.prompt_token_ids), r.prompt_logprobs) for r in rows]
    table = Table(
        rows={
            "line": np.array([r.line for r in rows], np.int64),
            "id": objects([utf8(r.id) for r in rows]),
            "sample": np.array([r.sample for r in rows], np.int32),
            "text": objects([utf8(r.text) for r in rows]),
            "finish_reason": np.array([FINISH_REASONS[r.finish_reason] for r in rows], np.uint8),
            "prompt_tokens": np.array([r.prompt_tokens for r in rows], np.int32),
            "queued_at": np.array([r.queued_at for r in rows], np.float64),
            "first_token_at": np.array([r.first_token_at for r in rows], np.float64),
            "finished_at": np.array([r.finished_at for r in rows], np.float64),
        },
        lengths={
            TOKENS: np.array([n for n, _ in generated], np.int64),
            PROMPTS: np.array([n for n, _ in prompts], np.int64),
            INPUTS: np.array([len(r.columns) for r in rows], np.int64),
        },
        entries={
            "token_ids": np.concatenate([np.empty(0, np.int32), *(r.token_ids for r in rows)]),
            **columns_of(generated, "logprobs", "top_token_ids", "top_logprobs"),
            **columns_of(prompts, "prompt_logprobs", "prompt_top_token_ids", "prompt_top_logprobs"),
        },
        errors={
            "line": np.array([e.line for e in errors], np.int64),
            "id": objects([utf8(e.id) for e in errors]),
            "reason": objects([utf8(e.reason) for e in errors]),
        },
        inputs=InputColumns.of_rows([r.line for r in rows], [r.columns for r in rows]),
    )
    if any(r.content is not None for r in rows):
        table.rows |= {
            "reasoning": objects([utf8(r.reasoning or "") for r in rows]),
            "content": objects([utf8(r.content or "") for r in rows]),
            "tool_calls": objects([msgspec.json.encode(r.tool_calls) if r.tool_calls else b"" for r in rows]),
        }
    if any(r.adapter for r in rows):
        table.rows[ADAPTER] = objects([utf8(r.adapter) for r in rows])
    if any(r.columns for r in rows):
        table.entries[PACKED] = np.frombuffer(b"".join(r.columns for r in rows), np.uint8)
    if any(e.columns for e in errors):
        table.errors["input"] = objects([json_object(e.columns, shown_name) if e.columns else b"" for e in errors])
    sums = np.array([r.cumulative_logprob for r in rows], np.float64)
    if not np.isnan(sums).all():
        table.rows["cumulative_logprob"] = sums
    if any(r.is_greedy is not None for r in rows):
        table.rows["perplexity"] = np.array([r.perplexity for r in rows], np.float64)
        table.rows |= {name: np.array([bool(getattr(r, name)) for r in rows]) for name in ("is_greedy", "is_best")}
    if "prompt_logprobs" in table.entries:
        table.entries["prompt_token_ids"] = np.array([i for r in rows for i in r.prompt_token_ids], np.int32)
    return table
