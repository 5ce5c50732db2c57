"""The Python API for scripts and notebooks: a model in this process, without result files and MPI."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from hpcdecode.config import EngineOptions, parse_bytes
from hpcdecode.data.prompts.fields import row_params
from hpcdecode.data.prompts.files import RawRow
from hpcdecode.data.prompts.rows import Row, RowError, RowReader
from hpcdecode.data.prompts.tokenizer import tokenized
from hpcdecode.data.results.collected import (
    CollectedResults,
    CompletionOutput,
    RequestOutput,
    ScoredOutput,
    ScoreOutput,
    prompt_error,
)
from hpcdecode.engine.desk import Desk
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.scale import Scale, lane_limits, placement_of
from hpcdecode.errors import PromptError, RowProblem, UserError
from hpcdecode.ranks.team import assemble
from hpcdecode.report.metrics import check_emptied
from hpcdecode.report.progress import NoProgress, Progress
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.admission import problem_of, sequences_of
from hpcdecode.system.model_path import find_model
from hpcdecode.system.signals import Signals

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHECKPOINT_SECONDS = 3600.0  # of other S-ranks, which this process does not have
T = TypeVar("T")
AnyPrompt = str | list[int] | dict[str, Any]
__all__ = ["LLM", "CompletionOutput", "PromptError", "RequestOutput", "ScoreOutput", "ScoredOutput"]


class LLM:
    """A model, loaded once, in this process, which plays both roles.

    Messages go to the logger `hpcdecode`, which prints nothing unless the caller sets up logging.

    Args:
        model: Directory of a Hugging Face model, a GGUF file, `org/name` or `org/name@revision` of a model in the local
            cache of the Hugging Face hub, `demo` or `smollm2`.
        lora: Directory of a PEFT adapter that is merged into the weights.
        dtype: Data type of weights and activations; None or "auto" chooses.
        weights: What the projections' weights are in memory: `dtype`, int8, int4, mxfp4 or fp8; None or "auto" for what
            the checkpoint has, if that changes no result, else `dtype`.
        kv_dtype: Data type of the KV cache; None or "auto" for `dtype`.
        device: Device of the slices; None or "auto" for `cuda` if there is a GPU.
        r_device: Device of the KV cache.
        batch: Sequences that decode at once; None chooses.
        period: Steps between injections of new prompts; None chooses.
        prefill_tokens: Most prompt tokens in a step; None chooses.
        kv_memory: Memory of the KV cache, in bytes or as a size such as "8G"; None chooses.
        gpu_memory: Most memory of a GPU to take, likewise; None for what is free.
        threads: Threads to compute with; None for one on each core of the process.
        reasoning_parser: What splits reasoning from content, as `--reasoning-parser` does.
        tool_call_parser: What finds calls of tools, as `--tool-call-parser` does.

    Raises:
        UserError: If the model cannot be run.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        lora: str | os.PathLike[str] | None = None,
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
        reasoning_parser: str = "none",
        tool_call_parser: str = "none",
    ):
        options = EngineOptions(
            model=find_model(os.fspath(model), os.environ),
            lora=None if lora is None else os.fspath(lora),
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
            reasoning_parser=reasoning_parser,
            tool_call_parser=tool_call_parser,
        ).check()
        team = assemble(None, None, options.device, options.r_device)
        if threads is not None:
            if threads < 1:
                raise UserError(f"threads: expected an integer >= 1, got {threads}")
            team.me.threads, team.me.pinned = threads, False
        self._engine = Engine(options, team)

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Generate text for every prompt.

        Sampled tokens depend only on the prompt, its seed and its position in the list.

        Args:
            prompts: Texts, lists of token ids, or dicts like the rows of a prompt file, with `prompt` or
                `prompt_token_ids` and sampling fields of their own. One alone needs no list around it.
            sampling_params: Sampling parameters for all prompts, or a list with those of each.
            use_tqdm: Show a progress bar.

        Returns:
            The results, in the order of the prompts.

        Raises:
            PromptError: If a prompt cannot be used, before any work. It is a ValueError.
        """
        return self._outputs(_all_fields(prompts), sampling_params, use_tqdm)

    def score(
        self, prompts: AnyPrompt | Sequence[AnyPrompt], logprobs: int | None = None, use_tqdm: bool = True
    ) -> list[ScoreOutput]:
        """Score given continuations, choices or texts; nothing is generated.

        Args:
            prompts: As in `generate`: dicts like the rows that `hpcdecode score` reads, with `continuation`,
                `continuations`, `choices` or their like. A prompt without any is scored itself.
            logprobs: Number of the most likely tokens in place of each token to return, too.
            use_tqdm: Show a progress bar.

        Returns:
            The scores, in the order of the prompts.

        Raises:
            PromptError: If a prompt cannot be used, before any work. It is a ValueError.
        """
        params = SamplingParams(max_tokens=1, logprobs=logprobs)
        rows, found, results = self._run(_all_fields(prompts), params, use_tqdm, score=True)
        return [
            ScoreOutput(row.id, self._text(row), prompt.token_ids, results.scores(row.line), results.best(row.line))
            for row, prompt in zip(rows, found, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
    ) -> list[RequestOutput]:
        """Generate a reply to one conversation or several, with the model's chat template.

        Args:
            messages: Messages of a conversation, or a list of conversations.
            sampling_params: As in `generate`.
            use_tqdm: Show a progress bar.
            add_generation_prompt: End the prompt with the header of a reply.
            continue_final_message: Continue the last message instead.
            chat_template_kwargs: Variables for the chat template.
            tools: Functions that the model may call, as the OpenAI API describes them.

        Returns:
            The results, in the order of the conversations.

        Raises:
            PromptError: If a conversation cannot be used, before any work. It is a ValueError.
        """
        conversations = [messages] if len(messages) and isinstance(messages[0], dict) else messages
        options = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
        }
        rows: list[object] = [{"messages": list(each), **options} for each in conversations]
        return self._outputs(rows, sampling_params, use_tqdm)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of transformers that prompts are encoded with."""
        return self._engine.tokenizer.backend

    def __repr__(self) -> str:
        options, setup = self._engine.options, self._engine.setup
        return f"LLM({options.model!r}, dtype={setup.dtype!r}, kv_dtype={setup.kv_dtype!r})"

    def _outputs(
        self, fields: list[object], params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        rows, prompts, results = self._run(fields, params, use_tqdm)
        return [
            RequestOutput(
                row.id, self._text(row), prompt.token_ids, results.outputs(row.line), results.prompt_logprobs(row.line)
            )
            for row, prompt in zip(rows, prompts, strict=True)
        ]

    def _run(
        self,
        fields: list[object],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        score: bool = False,
    ) -> tuple[list[Row], list[Prompt], CollectedResults]:
        engine, tokenizer = self._engine, self._engine.tokenizer
        reader = RowReader(model=engine.options.model, score=score)
        rows = _usable(_row(reader, number, *each) for number, each in enumerate(_with_params(fields, params), 1))
        prompts = _usable(tokenized(rows, tokenizer, engine.max_positions))
        results = CollectedResults()
        desk = Desk(prompts, results, tokenizer)
        progress = Progress(bar=True, total=len(prompts)) if use_tqdm else NoProgress()
        try:
            scales = engine.scales(desk)
            self._require_capacity(prompts, scales[0])
            check_emptied([engine.work(desk, scales, Signals(), progress, _CHECKPOINT_SECONDS)])
        finally:
            desk.feed.close()
        return rows, prompts, results

    def _require_capacity(self, prompts: list[Prompt], scale: Scale) -> None:
        engine, batch = self._engine, scale.lanes[0]
        options, setup, stops = engine.options, engine.setup, engine.stops
        limits, placement = lane_limits(options, setup, batch, scale), placement_of(options, engine.team, setup, 1)
        for prompt in prompts:
            sequences = sequences_of(prompt, 0, limits, placement, stops)
            if problem := problem_of(sequences, limits, placement):
                raise PromptError(f"prompt {prompt.line}: {problem}")

    def _text(self, row: Row) -> str | None:
        return self._engine.tokenizer.text(row) if row.prompt_token_ids is None else None


def _all_fields(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[object]:
    """Return prompts, or one alone, in the form of rows of a prompt file."""
    one = isinstance(prompts, (str, dict)) or (len(prompts) and isinstance(prompts[0], int))
    return [_fields(prompt) for prompt in ([prompts] if one else prompts)]


def _fields(prompt: object) -> object:
    """Return a prompt in the form of a row of a prompt file."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    return {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt


def _with_params(
    fields: list[object], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[object, SamplingParams]]:
    if params is None or isinstance(params, SamplingParams):
        return [(each, checked) for checked in [_checked(params or SamplingParams())] for each in fields]
    if len(params) != len(fields):
        raise PromptError(f"sampling_params: expected one for each of {len(fields)} prompts, got {len(params)}")
    return [(each, _checked(own)) for each, own in zip(fields, params, strict=True)]


def _checked(params: SamplingParams) -> SamplingParams:
    """Return the parameters after the checks that the rows of prompt files undergo."""
    try:
        return row_params(msgspec.to_builtins(params, str_keys=True), SamplingParams())
    except RowProblem as problem:
        raise PromptError(f"sampling_params: {problem}") from None


def _row(reader: RowReader, number: int, fields: Any, params: SamplingParams) -> Row | RowError:
    if not isinstance(fields, dict):
        return RowError(number, str(number), f"expected a string or a dict, got {type(fields).__name__}")
    return reader.read(RawRow(number, "", fields), params)


def _usable(items: Iterable[T | RowError]) -> list[T]:
    """Return the items, or raise PromptError for the first that is an error."""
    found: list[T] = []
    errors: list[RowError] = []
    for item in items:
        if isinstance(item, RowError):
            errors.append(item)
        else:
            found.append(item)
    if errors:
        raise prompt_error(errors[0], len(errors) - 1)
    return found
