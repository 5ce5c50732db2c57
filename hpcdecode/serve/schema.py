"""The bodies of requests as the published OpenAPI schema has them, made of the fields that rows may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hpcdecode.data.prompts.batch_format import HARMLESS, NEUTRAL
from hpcdecode.data.prompts.fields import LORA, OPENAI_LOGPROBS, OPENAI_MAX_TOKENS, RESPONSE_FORMAT, UNSUPPORTED
from hpcdecode.requests.params import (
    MAX_BEAMS,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROBS,
    MAX_SAMPLES,
    MAX_SEED,
    sampling_kinds,
)
from hpcdecode.serve.bodies import STREAM_OPTIONS

Schema = dict[str, Any]

BOOLEAN: Schema = {"type": "boolean"}
STRING: Schema = {"type": "string"}
TEXT: Schema = {"type": "string", "minLength": 1}
TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_KINDS: dict[Any, Schema] = {
    bool: BOOLEAN,
    int: {"type": "integer"},
    int | None: {"type": "integer"},
    float: {"type": "number"},
    tuple[int, ...]: {"type": "array", "items": {"type": "integer", "minimum": 0}},
    tuple[str, ...]: {"anyOf": [TEXT, {"type": "array", "items": TEXT}]},
    dict[int, float]: {
        "type": "object",
        "patternProperties": {"^[0-9]{1,18}$": {"type": "number", "minimum": -100, "maximum": 100}},
        "additionalProperties": False,
    },
    dict[str, Any] | None: {"type": "object", "minProperties": 1, "maxProperties": 1},
}
_RANGES: dict[str, Schema] = {
    "n": {"minimum": 1, "maximum": MAX_SAMPLES},
    "max_tokens": {"minimum": 0},
    "min_tokens": {"minimum": 0},
    "temperature": {"minimum": 0},
    "top_k": {"minimum": -1},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "seed": {"minimum": 0, "maximum": MAX_SEED},
    "truncate_prompt_tokens": {"minimum": -1},
    "logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "prompt_logprobs": {"minimum": 0, "maximum": MAX_LOGPROBS},
    "thinking_token_budget": {"minimum": 0},
    "beam_width": {"minimum": 1, "maximum": MAX_BEAMS},
    "length_penalty": {"minimum": -MAX_LENGTH_PENALTY, "maximum": MAX_LENGTH_PENALTY},
}
_FUNCTION: Schema = {"type": "object", "required": ["name"], "properties": {"name": STRING}}
_TOOL: Schema = {"type": "object", "required": ["function"], "properties": {"function": _FUNCTION}}
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": STRING},
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": TEXT,
        "content": {"anyOf": [STRING, {"type": "array", "items": {"anyOf": [STRING, _PART]}}, {"type": "null"}]},
        "tool_calls": {"anyOf": [{"type": "array", "items": _TOOL}, {"type": "null"}]},
    },
}
MESSAGES: Schema = {"type": "array", "items": _MESSAGE, "minItems": 1}
_PROMPT: Schema = {
    "anyOf": [
        TEXT,
        TOKENS,
        {"type": "array", "items": {"anyOf": [TEXT, TOKENS]}, "minItems": 1},
    ]
}
_FORMAT: Schema = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {"type": "object"}},
}
CHAT_OPTIONS: dict[str, Schema] = {
    "add_generation_prompt": BOOLEAN,
    "continue_final_message": BOOLEAN,
    "chat_template_kwargs": {"type": "object"},
    "tools": {"type": "array", "items": _TOOL},
    "tool_choice": {"enum": ["auto", "none"]},
}


def nullable(schema: Schema) -> Schema:
    """Return a schema that null suits, too."""
    return {"anyOf": [schema, {"type": "null"}]}


def closed_object(properties: dict[str, Schema], *required: str) -> Schema:
    """Return the schema of an object with no fields but these; those that are not required may be null."""
    made = {name: value if name in required else nullable(value) for name, value in properties.items()}
    return {"type": "object", "properties": made, "required": list(required), "additionalProperties": False}


def _sampling(models: Sequence[str]) -> dict[str, Schema]:
    found = {name: {**_KINDS[kind], **_RANGES.get(name, {})} for name, kind in sampling_kinds().items()}
    refused = {name: {"enum": list(neutral)} for name, neutral in (UNSUPPORTED | NEUTRAL).items() if neutral}
    return {
        **found,
        **{name: {} for name in sorted(HARMLESS - {"stream_options"})},
        **refused,
        OPENAI_MAX_TOKENS: {"type": "integer", "minimum": 0},
        RESPONSE_FORMAT: _FORMAT,
        "model": {"enum": list(models)},
        LORA: STRING,
        "stream": BOOLEAN,
        "stream_options": closed_object(dict.fromkeys(STREAM_OPTIONS, BOOLEAN)),
    }


def completion_body(models: Sequence[str]) -> Schema:
    """Return the schema of a body of `/v1/completions` for a model with these names."""
    return closed_object({"prompt": _PROMPT, "echo": BOOLEAN, **_sampling(models)}, "prompt")


def chat_body(models: Sequence[str]) -> Schema:
    """Return the schema of a body of `/v1/chat/completions`, likewise."""
    sampling = _sampling(models)
    logprobs = {"logprobs": {"anyOf": [BOOLEAN, sampling["logprobs"]]}, OPENAI_LOGPROBS: sampling["logprobs"]}
    return closed_object({"messages": MESSAGES, **CHAT_OPTIONS, **sampling, **logprobs}, "messages")


def tokenize_body(models: Sequence[str]) -> Schema:
    """Return the schema of a body of `/tokenize`, likewise."""
    flags: dict[str, Schema] = {
        "model": {"enum": list(models)},
        "add_special_tokens": BOOLEAN,
        "return_token_strs": BOOLEAN,
    }
    return {
        "anyOf": [
            closed_object({"prompt": STRING, **flags}, "prompt"),
            closed_object({"messages": MESSAGES, **CHAT_OPTIONS, **flags}, "messages"),
        ]
    }


def detokenize_body(models: Sequence[str]) -> Schema:
    """Return the schema of a body of `/detokenize`, likewise."""
    return closed_object({"tokens": {**TOKENS, "minItems": 0}, "model": {"enum": list(models)}}, "tokens")


def json_body(schema: Schema) -> dict[str, Any]:
    """Return what tells FastAPI the schema of a route's body, which the route reads itself."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
