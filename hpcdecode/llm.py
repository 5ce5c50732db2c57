"""The Python API: a model in this process, prompts in and texts out. For scripts and notebooks; no files, no MPI."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from hpcdecode.config import EngineOptions, find_model, parse_bytes
from hpcdecode.data.prompts.fields import row_params
from hpcdecode.data.prompts.files import RawRow
from hpcdecode.data.prompts.rows import Row, RowError, RowReader
from hpcdecode.data.prompts.tokenizer import tokenized
from hpcdecode.data.results.writer import Result
from hpcdecode.engine.desk import Desk
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.setup import Scale
from hpcdecode.errors import RowProblem, UserError
from hpcdecode.ranks import launch
from hpcdecode.report.metrics import check_emptied
from hpcdecode.report.progress import NoProgress, Progress
from hpcdecode.requests.logprobs import Logprobs
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt, Unfinished
from hpcdecode.schedule.admission import problem_of, row_branches
from hpcdecode.system.signals import Signals

_CHECKPOINT_SECONDS = 3600.0  # nothing is checkpointed


class PromptError(UserError, ValueError):
    """A prompt, or what is asked for it, cannot be used; nothing was generated."""


@dataclass(frozen=True)
class CompletionOutput:
    """One sequence. finish_reason: stop or length.

    logprobs: of every token, where they were asked for: the log-probabilities of itself and of the most likely tokens,
    by token id. cumulative_logprob: of all of them; NaN where it is not known.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    cumulative_logprob: float
    logprobs: list[dict[int, float]] | None


@dataclass(frozen=True)
class RequestOutput:
    """What became of one prompt. prompt: its text, None where it came as token ids. outputs: its samples.

    prompt_logprobs: as those of an output, of the prompt's tokens; None for the first, which has none.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, float] | None] | None
    finished: bool = True


class LLM:
    """A model loaded once, in one process that plays both roles.

    model: a Hugging Face directory, or `demo`. dtype, weights, kv_dtype, device, r_device: as the flags of `hpcdecode
    generate`; None or "auto" chooses. batch: sequences decoding at once. kv_memory, gpu_memory: bytes, or a size such
    as "8G". threads: cores to use (all that the process has). Raises UserError where the model cannot be run.
    """

    def __init__(
        self,
        model: str | os.PathLike,
        *,
        dtype: str | None = None,
        weights: str | None = None,
        kv_dtype: str | None = None,
        device: str | None = None,
        r_device: str = "cpu",
        batch: int | None = None,
        period: int | None = None,
        prefill_tokens: int | None = None,
        kv_memory: int | str | None = None,
        gpu_memory: int | str | None = None,
        threads: int | None = None,
    ):
        options = EngineOptions(
            model=find_model(os.fspath(model), os.environ),
            dtype=None if dtype == "auto" else dtype,
            weights=None if weights == "auto" else weights,
            kv_dtype=None if kv_dtype == "auto" else kv_dtype,
            device=None if device == "auto" else device,
            r_device=r_device,
            batch=batch,
            period=period,
            prefill_tokens=prefill_tokens,
            kv_memory=parse_bytes(kv_memory) if isinstance(kv_memory, str) else kv_memory,
            gpu_memory=parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory,
        ).check()
        team = launch.assemble(None, None, options.device, options.r_device)
        if threads is not None:
            if threads < 1:
                raise UserError(f"threads: expected an integer >= 1, got {threads}")
            team.me.threads, team.me.pinned = threads, False
        self._engine = Engine(options, team)

    def generate(
        self,
        prompts: str | dict[str, Any] | Sequence[str | dict[str, Any]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate for every prompt; results are in the order of the prompts.

        prompts: text, or dicts as the rows of a prompt file (`prompt` or `prompt_token_ids`, sampling fields of their
        own). sampling_params: one for all, or one for each. A sampled prompt's tokens depend on its seed and its place
        in the list alone. Raises PromptError, a ValueError, before any work if one of them cannot be used.
        """
        given = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
        rows = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in given]
        return self._run(rows, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for a conversation or several, through the model's chat template; options are as in rows."""
        several = [messages] if len(messages) and isinstance(messages[0], dict) else messages
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
        }
        return self._run([{"messages": list(each), **options} for each in several], sampling_params, use_tqdm)

    def _run(
        self, fields: list[dict[str, Any]], params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        engine = self._engine
        reader = RowReader(model=engine.options.model)
        rows = _usable(_row(reader, number, *each) for number, each in enumerate(_with_params(fields, params), 1))
        prompts = _usable(tokenized(rows, engine.tokenizer, engine.max_positions))
        results = _Collected()
        desk = Desk(prompts, results, engine.tokenizer)
        progress = Progress(bar=True, total=len(prompts)) if use_tqdm else NoProgress()
        try:
            scale = engine.scale(desk)
            self._require_room(prompts, scale)
            check_emptied([engine.work(desk, scale, Signals(), progress, _CHECKPOINT_SECONDS)])
        finally:
            desk.feed.close()
        return [self._output(row, prompt, results) for row, prompt in zip(rows, prompts, strict=True)]

    def _require_room(self, prompts: list[Prompt], scale: Scale) -> None:
        engine, batch = self._engine, scale.lane_batches[0][0]
        limits, placement, stops = engine.limits(batch, scale), engine.placement(1), engine.stops
        for prompt in prompts:
            branches = row_branches(prompt, 0, limits, placement, stops)
            if problem := problem_of(branches, limits, placement):
                raise PromptError(f"prompt {prompt.line}: {problem}")

    def _output(self, row: Row, prompt: Prompt, results: _Collected) -> RequestOutput:
        text = self._engine.tokenizer.chat_text(row) if row.messages is not None else row.prompt
        outputs, logprobs = results.outputs(row.line), results.prompt_logprobs(row.line)
        return RequestOutput(row.id, text, prompt.token_ids, outputs, logprobs)


class _Collected:
    """Results in memory, in place of a file."""

    def __init__(self) -> None:
        self.error_count = 0
        self.unfinished: Any = list[Unfinished]
        self._results: dict[int, list[Result]] = {}  # by line

    def add(self, *samples: Result) -> None:
        self._results[samples[0].line] = sorted(samples, key=lambda r: r.sample)

    def error(self, e: RowError) -> None:
        raise _problem(e)

    def tick(self) -> None:
        """Nothing is ever due."""

    def outputs(self, line: int) -> list[CompletionOutput]:
        return [
            CompletionOutput(r.sample, r.text, r.token_ids, r.finish_reason, r.cumulative_logprob, _by_token(r))
            for r in self._results[line]
        ]

    def prompt_logprobs(self, line: int) -> list[dict[int, float] | None] | None:
        first = self._results[line][0]
        held = first.prompt_logprobs
        return None if held is None else [None, *_likely(first.prompt_token_ids, held)[1:]]


def _by_token(result: Result) -> list[dict[int, float]] | None:
    return None if result.logprobs is None else _likely(result.token_ids, result.logprobs)


def _likely(token_ids: Sequence[int], held: Logprobs) -> list[dict[int, float]]:
    each = zip(token_ids, held.chosen, held.top_ids, held.top, strict=True)
    return [{**dict(zip(ids, values, strict=True)), token: own} for token, own, ids, values in each]


def _with_params(
    fields: list[dict[str, Any]], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[dict[str, Any], SamplingParams]]:
    if params is None or isinstance(params, SamplingParams):
        return [(each, checked) for checked in [_checked(params or SamplingParams())] for each in fields]
    if len(params) != len(fields):
        raise PromptError(f"sampling_params: expected one for each of {len(fields)} prompts, got {len(params)}")
    return [(each, _checked(own)) for each, own in zip(fields, params, strict=True)]


def _checked(params: SamplingParams) -> SamplingParams:
    """The parameters with lists and single strings as rows of prompt files may have them."""
    try:
        return row_params(msgspec.to_builtins(params, str_keys=True), SamplingParams())
    except RowProblem as problem:
        raise PromptError(f"sampling_params: {problem}") from None


def _row(reader: RowReader, number: int, fields: Any, params: SamplingParams) -> Row | RowError:
    if not isinstance(fields, dict):
        return RowError(number, str(number), f"expected a string or a dict, got {type(fields).__name__}")
    return reader.read(RawRow(number, "", fields), params)


def _usable(items: Any) -> list:
    found = list(items)
    errors = [item for item in found if isinstance(item, RowError)]
    if errors:
        raise _problem(errors[0], len(errors) - 1)
    return found


def _problem(error: RowError, others: int = 0) -> PromptError:
    more = f" (and {others} more that cannot be used)" if others else ""
    return PromptError(f"prompt {error.line}: {error.reason}{more}")
