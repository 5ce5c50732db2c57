"""The Python API for scripts and notebooks: a model in this process, without result files and MPI."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import TYPE_CHECKING, Any, Literal, overload

from hpcdecode.config import EngineOptions
from hpcdecode.data.prompts.given import each_with_params, with_adapter
from hpcdecode.data.results.collected import (
    CompletionOutput,
    RequestOutput,
    ScoredOutput,
    ScoreOutput,
    output_of,
    score_of,
)
from hpcdecode.engine.calls import Calls
from hpcdecode.engine.engine import Engine
from hpcdecode.errors import PromptError, UserError
from hpcdecode.ranks.team import assemble
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.speculative import SpeculativeConfig
from hpcdecode.system.model_path import find_model
from hpcdecode.system.sizes import parse_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

AnyPrompt = str | list[int] | dict[str, Any]
__all__ = ["LLM", "CompletionOutput", "PromptError", "RequestOutput", "ScoreOutput", "ScoredOutput"]


class LLM:
    """A model, loaded once, in this process, which plays both roles.

    Messages go to the logger `hpcdecode`, which prints nothing unless the caller sets up logging.

    Args:
        model: Directory of a Hugging Face model, a GGUF file, `org/name` or `org/name@revision` of a model in the local
            cache of the Hugging Face hub, `demo` or `smollm2`.
        lora: Directory of a PEFT adapter that is merged into the weights, for all prompts; or directories by name, of
            adapters that prompts choose.
        dtype: Data type of weights and activations; None or "auto" chooses.
        weights: What the projections' weights are in memory: `dtype`, int8, int4, mxfp4, mxfp8 or fp8; None or "auto"
            for what the checkpoint has, if that changes no result, else `dtype`.
        activations: int8 to round what GEMMs by weights in few bits take; None or "auto" for `dtype`.
        kv_dtype: Data type of the KV cache; None or "auto" for `dtype`.
        mamba_ssm_cache_dtype: Data type of recurrent states: float32 or bfloat16; None or "auto" for float32.
        device: Device of the slices; None or "auto" for `cuda` if there is a GPU.
        r_device: Device of the KV cache.
        batch: Sequences that decode at once; None chooses.
        period: Steps between injections of new prompts; None chooses.
        prefill_tokens: Most prompt tokens in a step; None chooses.
        kv_memory: Memory of the KV cache, in bytes or as a size such as "8G"; None chooses.
        gpu_memory: Most memory of a GPU to take, likewise; None for what is free.
        speculative_config: How tokens are guessed ahead, as `--speculative-config` takes it; None for no guesses.
        threads: Threads to compute with; None for one on each core of the process.
        skip_tokenizer_init: Do without the model's tokenizer: prompts are token ids, and outputs have no text.
        reasoning_parser: What splits reasoning from content, as `--reasoning-parser` does.
        tool_call_parser: What finds calls of tools, as `--tool-call-parser` does.

    Raises:
        UserError: If the model cannot be run.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        lora: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None = None,
        dtype: str | None = None,
        weights: str | None = None,
        activations: str | None = None,
        kv_dtype: str | None = None,
        mamba_ssm_cache_dtype: str | None = None,
        device: str | None = None,
        r_device: str = "cpu",
        batch: int | None = None,
        period: int | None = None,
        prefill_tokens: int | None = None,
        kv_memory: int | str | None = None,
        gpu_memory: int | str | None = None,
        speculative_config: dict[str, Any] | SpeculativeConfig | None = None,
        threads: int | None = None,
        skip_tokenizer_init: bool = False,
        reasoning_parser: str = "none",
        tool_call_parser: str = "none",
    ):
        options = EngineOptions(
            model=find_model(os.fspath(model), os.environ),
            lora=None if lora is None or isinstance(lora, Mapping) else os.fspath(lora),
            adapters={name: os.fspath(folder) for name, folder in lora.items()} if isinstance(lora, Mapping) else {},
            dtype=None if dtype == "auto" else dtype,
            weights=None if weights == "auto" else weights,
            activations=None if activations == "auto" else activations,
            kv_dtype=None if kv_dtype == "auto" else kv_dtype,
            mamba_ssm_cache_dtype=None if mamba_ssm_cache_dtype == "auto" else mamba_ssm_cache_dtype,
            device=None if device == "auto" else device,
            r_device=r_device,
            batch=batch,
            period=period,
            prefill_tokens=prefill_tokens,
            kv_memory=parse_bytes(kv_memory) if isinstance(kv_memory, str) else kv_memory,
            gpu_memory=parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory,
            speculative_config=None if speculative_config is None else _speculation(speculative_config),
            skip_tokenizer_init=skip_tokenizer_init,
            reasoning_parser=reasoning_parser,
            tool_call_parser=tool_call_parser,
        ).check()
        team = assemble(None, None, options.device, options.r_device)
        if threads is not None:
            if threads < 1:
                raise UserError(f"threads: expected an integer >= 1, got {threads}")
            team.me.threads, team.me.pinned = threads, False
        self._engine = Engine(options, team)
        self._calls = Calls(self._engine)

    @overload
    def generate(
        self,
        prompts: Iterator[AnyPrompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora: str | None = None,
    ) -> Iterator[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora: str | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt] | Iterator[AnyPrompt],
        sampling_params: SamplingParams | Any | None = None,
        use_tqdm: bool = True,
        *,
        lora: str | None = None,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Generate text for every prompt. An iterator of prompts, such as a generator, goes to `generate_iter`.

        Sampled tokens depend only on the prompt, its seed and its position in the list.

        Args:
            prompts: Texts, lists of token ids, or dicts like the rows of a prompt file, with `prompt` or
                `prompt_token_ids` and sampling fields of their own. One alone needs no list around it.
            sampling_params: Sampling parameters for all prompts, or a list with those of each.
            use_tqdm: Show a progress bar.
            lora: Name of the adapter of prompts that have no field `lora`; None for none.

        Returns:
            The results, in the order of the prompts; of an iterator, what `generate_iter` returns.

        Raises:
            PromptError: If a prompt cannot be used, before any work. It is a ValueError.
        """
        if isinstance(prompts, Iterator):
            return self.generate_iter(prompts, sampling_params, use_tqdm, lora=lora)
        return self._outputs(_rows_of(prompts, lora), sampling_params, use_tqdm)

    def generate_iter(
        self,
        prompts: Iterable[AnyPrompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        errors: Literal["raise", "yield"] = "raise",
        lora: str | None = None,
    ) -> Iterator[RequestOutput]:
        """Generate text for prompts of any number, and yield each result when it is finished.

        Results come in the order in which they finish; `request_id` is the prompt's `id`, or its number from 1. Tokens
        are those of `generate`. In memory are some thousand prompts, those that are being generated and 256 results,
        so a caller that is slow makes the model wait. Leaving the loop, or `close()` of the iterator, ends the
        work and frees its memory. Until then the model takes no other call. Nothing begins before the first result is
        asked for.

        Args:
            prompts: As in `generate`. They are read ahead in a thread of their own, so they must not wait for results.
            sampling_params: Sampling parameters for all prompts, or those of each.
            use_tqdm: Show a progress bar.
            errors: Raise PromptError for a prompt that cannot be used, after the results that are finished before; or
                yield it, with no outputs and the reason as its `error`, and go on.
            lora: As in `generate`.

        Raises:
            PromptError: If a prompt cannot be used. It is a ValueError.
        """
        if errors not in ("raise", "yield"):
            raise UserError(f"errors: expected raise or yield, got {errors!r}")
        if isinstance(prompts, (str, dict)):
            raise UserError(f"expected an iterable of prompts, got one prompt: {prompts!r:.60}")
        total = len(prompts) if isinstance(prompts, Sized) else None
        rows = each_with_params((with_adapter(prompt, lora) for prompt in prompts), sampling_params)
        return self._calls.stream(rows, total, use_tqdm, errors)

    def score(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        logprobs: int | None = None,
        use_tqdm: bool = True,
        *,
        lora: str | None = None,
    ) -> list[ScoreOutput]:
        """Score given continuations, choices or texts; nothing is generated.

        Args:
            prompts: As in `generate`: dicts like the rows that `hpcdecode score` reads, with `continuation`,
                `continuations`, `choices` or their like. A prompt without any is scored itself.
            logprobs: Number of the most likely tokens in place of each token to return, too.
            use_tqdm: Show a progress bar.
            lora: As in `generate`.

        Returns:
            The scores, in the order of the prompts.

        Raises:
            PromptError: If a prompt cannot be used, before any work. It is a ValueError.
        """
        params = SamplingParams(max_tokens=1, logprobs=logprobs)
        found = self._calls.run(_rows_of(prompts, lora), params, use_tqdm, score=True)
        return [score_of(*each) for each in found]

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
        lora: str | None = None,
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
            lora: Name of the adapter; None for none.

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
            "lora": lora,
        }
        rows: list[object] = [{"messages": list(each), **options} for each in conversations]
        return self._outputs(rows, sampling_params, use_tqdm)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer of transformers that prompts are encoded with, or raise UserError if it is skipped."""
        if self._engine.options.skip_tokenizer_init:
            raise UserError("get_tokenizer: expected a model with a tokenizer, got skip_tokenizer_init")
        return self._engine.tokenizer.backend

    def __repr__(self) -> str:
        options, setup = self._engine.options, self._engine.setup
        return f"LLM({options.model!r}, dtype={setup.dtype!r}, kv_dtype={setup.kv_dtype!r})"

    def _outputs(
        self, fields: list[object], params: SamplingParams | Sequence[SamplingParams] | None, use_tqdm: bool
    ) -> list[RequestOutput]:
        return [output_of(*each) for each in self._calls.run(fields, params, use_tqdm)]


def _rows_of(prompts: AnyPrompt | Sequence[AnyPrompt], lora: str | None) -> list[object]:
    """Return prompts, or one alone, in the form of rows of a prompt file."""
    one = isinstance(prompts, (str, dict)) or (len(prompts) and isinstance(prompts[0], int))
    return [with_adapter(prompt, lora) for prompt in ([prompts] if one else prompts)]


def _speculation(given: dict[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
    """Return settings as they are or as a dictionary, or raise UserError."""
    try:
        return SpeculativeConfig.of(given)
    except ValueError as error:
        raise UserError(f"speculative_config: {error}") from None
