"""Reads the bodies of requests for text: what concerns the answer is taken out, and the rest becomes rows."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import msgspec

from hpcdecode.data.prompts.batch_format import choosing
from hpcdecode.data.prompts.fields import LORA, OPENAI_MAX_TOKENS
from hpcdecode.data.results.openai_body import URLS
from hpcdecode.engine.live import UNBOUNDED
from hpcdecode.errors import RowProblem
from hpcdecode.requests.params import MAX_SEED, SamplingParams
from hpcdecode.requests.values import is_integer, shown, suggestion, type_name
from hpcdecode.serve.context import Context
from hpcdecode.serve.errors import ApiError
from hpcdecode.serve.options import MOST_CHOICES

COMPLETION_TOKENS = 16  # max_tokens of text completions, as the OpenAI API has it
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")

GivenPrompt = str | list[int] | None  # None for messages


@dataclass
class Asked:
    """A request for text.

    Attributes:
        endpoint: `chat` or `completions`.
        model: Name of the model, or of the adapter, for the answer.
        rows: The fields of each prompt, as requests of the batch format.
        prompts: The prompts as they came.
        defaults: Sampling parameters that the fields replace.
        stream: Whether the answer is streamed.
        usage: Whether a stream ends with the usage.
        running_usage: Whether each chunk of a stream has it.
        echo: Whether the text begins with the prompt.
        shows_prompt: Whether the answer has the field `prompt_logprobs`.
        scores: Whether nothing is generated: the prompt's own log-probabilities are asked for, if any.
    """

    endpoint: str
    model: str
    rows: list[dict[str, Any]]
    prompts: list[GivenPrompt]
    defaults: SamplingParams
    stream: bool = False
    usage: bool = False
    running_usage: bool = False
    echo: bool = False
    shows_prompt: bool = False
    scores: bool = False

    @property
    def whole(self) -> bool:
        """Return whether nothing can be shown before the end: a prompt's log-probabilities come with the result."""
        body = self.rows[0]["body"]
        return body.get("beam_width") is not None or body.get("prompt_logprobs") is not None


def json_object(data: bytes) -> dict[str, Any]:
    """Return the object that a body is. Raises ApiError if it is none."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise ApiError(400, f"body: expected JSON, got: {e}", code="invalid_json") from e
    except RecursionError as e:
        raise ApiError(400, "body: expected JSON, got one nested too deeply", code="invalid_json") from e
    if not isinstance(value, dict):
        raise ApiError(400, f"body: expected a JSON object, got {type_name(value)}", code="invalid_json")
    return value


def model_of(body: dict[str, Any], context: Context) -> str:
    """Take the name of the model out of a body, and return it, or the first name if there is none.

    Raises:
        ApiError: It is another model's.
    """
    named = body.pop("model", None)
    if named is None:
        return context.models[0]
    if not isinstance(named, str):
        raise ApiError(400, f"model: expected a string, got {type_name(named)} {shown(named)}", "model")
    require_model(named, context)
    return named


def require_model(named: str, context: Context) -> None:
    """Raise ApiError unless a name means the model of the server."""
    if not context.is_model(named):
        expected = " or ".join(context.names)
        raise ApiError(404, f"model: expected {expected}, got {shown(named)}", "model", "model_not_found")


def asked_of(body: dict[str, Any], endpoint: str, context: Context) -> Asked:
    """Return what a body asks for. The fields of its rows are checked when they are submitted.

    Args:
        body: Of the request; it is changed.
        endpoint: `chat` or `completions`.
        context: Of the server.

    Raises:
        ApiError: The model is not known.
        RowProblem: A field that concerns the answer cannot be used, or two adapters are named.
    """
    body = choosing(body, context.adapters)
    model = model_of(body, context)
    model = body[LORA] if body.get(LORA) in context.adapters else model
    stream = _boolean(body, "stream")
    options = _stream_options(body, stream)
    completes = endpoint == "completions"
    echo = _boolean(body, "echo") if completes else False
    asked = Asked(endpoint, model, [], [None], context.defaults, stream, *options, echo)
    asked.shows_prompt = body.get("prompt_logprobs") is not None
    if stream and asked.shows_prompt:
        raise RowProblem("prompt_logprobs: expected without stream, got both")
    if completes:
        _prepare_completion(body, asked)
    most = COMPLETION_TOKENS if completes else UNBOUNDED
    asked.defaults = msgspec.structs.replace(context.defaults, max_tokens=most)
    _draw_seed(body, context.defaults)
    _bound_choices(body, len(asked.prompts), MOST_CHOICES)
    for prompt in asked.prompts:
        own = body if prompt is None else {**body, "prompt": prompt}
        asked.rows.append({"url": URLS[endpoint], "body": own})
    return asked


def _prepare_completion(body: dict[str, Any], asked: Asked) -> None:
    """Settle what only text completions have: several prompts, an echo, and none but the prompt's tokens."""
    if body.get("prompt") is not None:
        asked.prompts = list(_prompts(body["prompt"]))
    logprobs = body.get("logprobs")
    if isinstance(logprobs, bool):
        raise RowProblem(f"logprobs: expected an integer, got {shown(logprobs)}")
    if asked.echo and logprobs is not None and not asked.shows_prompt:
        body["prompt_logprobs"] = logprobs
    name = "max_tokens" if body.get(OPENAI_MAX_TOKENS) is None else OPENAI_MAX_TOKENS
    if is_integer(body.get(name)) and body[name] == 0:
        if not asked.echo:
            raise RowProblem(f"{name}: expected an integer >= 1, or 0 beside echo, got 0")
        if body.get("n", 1) not in (None, 1):
            raise RowProblem(f"n: expected 1 beside max_tokens 0, got {shown(body['n'])}")
        if asked.shows_prompt:
            got = shown(body["prompt_logprobs"])
            raise RowProblem(f"prompt_logprobs: expected none beside max_tokens 0, got {got}; use logprobs")
        body[name], asked.scores = 1, True


def _prompts(value: Any) -> list[GivenPrompt]:
    """Return the prompts that the field `prompt` has: a text, tokens, or a list of these."""
    if isinstance(value, list):
        if not value:
            raise RowProblem("prompt: expected a string, token ids or a list of them, got an empty list")
        if any(isinstance(each, (str, list)) for each in value):
            for index, each in enumerate(value):
                if not isinstance(each, (str, list)):
                    got = f"{type_name(each)} {shown(each)}"
                    raise RowProblem(f"prompt: expected strings or lists of token ids, got {got} at index {index}")
            return value
    return [value]


def _boolean(body: dict[str, Any], name: str) -> bool:
    value = body.pop(name, None)
    if value is not None and not isinstance(value, bool):
        raise RowProblem(f"{name}: expected true or false, got {type_name(value)} {shown(value)}")
    return bool(value)


def _stream_options(body: dict[str, Any], stream: bool) -> tuple[bool, bool]:
    """Take `stream_options` out of a body; return whether usage ends the stream, and whether each chunk has it."""
    value = body.pop("stream_options", None)
    if value is None:
        return False, False
    if not isinstance(value, dict):
        raise RowProblem(f"stream_options: expected an object, got {type_name(value)} {shown(value)}")
    if not stream:
        raise RowProblem("stream_options: expected beside stream true, got a request without it")
    for name, given in value.items():
        if name not in STREAM_OPTIONS:
            hint = suggestion(name, STREAM_OPTIONS)
            raise RowProblem(f"stream_options: expected {', '.join(STREAM_OPTIONS)}, got {shown(name)}{hint}")
        if given is not None and not isinstance(given, bool):
            raise RowProblem(f"stream_options.{name}: expected true or false, got {type_name(given)} {shown(given)}")
    return bool(value.get("include_usage")), bool(value.get("continuous_usage_stats"))


def _draw_seed(body: dict[str, Any], defaults: SamplingParams) -> None:
    """Give a request that samples a seed at random, unless it has one."""
    given = body.get("temperature")
    temperature = defaults.temperature if given is None else given
    if body.get("seed") is None and isinstance(temperature, (int, float)) and temperature > 0:
        body["seed"] = secrets.randbelow(MAX_SEED + 1)


def _bound_choices(body: dict[str, Any], prompts: int, most: int) -> None:
    samples: Any = body.get("n")
    count = prompts * (samples if is_integer(samples) else 1)
    if count > most:
        raise RowProblem(f"n: expected at most {most} choices (prompts times n), got {shown(count)}")
