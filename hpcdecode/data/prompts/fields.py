"""The sampling fields of a row: their types are checked, and they replace the job's own sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from hpcdecode.errors import RowProblem
from hpcdecode.requests.field_types import typed
from hpcdecode.requests.params import SamplingParams, sampling_kinds
from hpcdecode.requests.values import shown, type_name

LORA = "lora"
OPENAI_LOGPROBS = "top_logprobs"
OPENAI_MAX_TOKENS = "max_completion_tokens"  # the newer name, which wins
RESPONSE_FORMAT = "response_format"  # the name of structured_outputs in the OpenAI API

# Fields of vLLM and OpenAI that would change the result, with the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "best_of": (1,),
    "chat_template": (),
    "detokenize": (True,),
    "extra_args": (),
    "guided_choice": (),
    "guided_decoding": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "spaces_between_special_tokens": (True,),
    "use_beam_search": (False,),
}


def row_params(fields: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of a row.

    Args:
        fields: Fields of the row. A sampling field that is not null replaces the job's value. Other fields are ignored.
        defaults: The job's own sampling parameters.

    Raises:
        RowProblem: A value has a wrong type or is out of range, or a field is not supported yet.
    """
    for name in UNSUPPORTED.keys() & fields.keys():
        if not asks_for_nothing(fields[name], UNSUPPORTED[name]):
            raise RowProblem(f"{name}: not supported yet, got {shown(fields[name])}; remove the field")
    if isinstance(fields.get("logprobs"), bool):  # the chat API of OpenAI has the count in another field
        top = fields.get(OPENAI_LOGPROBS) or 0
        fields = {**fields, "logprobs": top if fields["logprobs"] else None}
    if fields.get(OPENAI_MAX_TOKENS) is not None:
        fields = {**fields, "max_tokens": fields[OPENAI_MAX_TOKENS]}
    if fields.get(RESPONSE_FORMAT) is not None:
        fields = {**fields, "structured_outputs": _structured_outputs(fields)}
    kinds = sampling_kinds()
    own = {name: typed(name, kinds[name], fields[name]) for name in kinds if fields.get(name) is not None}
    return msgspec.structs.replace(defaults, **own).check() if own else defaults


def adapter_of(fields: dict[str, Any], adapters: Sequence[str] | None) -> str:
    """Return the name of the adapter that a row chooses, empty if it chooses none; in tables none is an empty text.

    Args:
        fields: Fields of the row.
        adapters: Names of the adapters that there are; None accepts any.

    Raises:
        RowProblem: There is no such adapter.
    """
    name = fields.get(LORA)
    if name is None or name == "":
        return ""
    if not isinstance(name, str):
        raise RowProblem(f"{LORA}: expected the name of an adapter, got {type_name(name)} {shown(name)}")
    if adapters is not None and name not in adapters:
        known = f"one of {', '.join(adapters)}" if adapters else "none, as the job has no --lora NAME=DIR"
        raise RowProblem(f"{LORA}: expected {known}, got {shown(name)}")
    return name


def _structured_outputs(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Return the structured_outputs that a `response_format` of the OpenAI API stands for."""
    asked, own = fields[RESPONSE_FORMAT], fields.get("structured_outputs")
    if own is not None:
        raise RowProblem(f"expected one of structured_outputs and {RESPONSE_FORMAT}, got both")
    kind = asked.get("type") if isinstance(asked, dict) else None
    schema = asked.get("json_schema") if kind == "json_schema" else None
    if isinstance(schema, dict) and isinstance(schema.get("schema"), dict):
        return {"json": schema["schema"]}
    if kind not in ("text", "json_object"):
        expected = "an object with type text, json_object, or json_schema and json_schema.schema"
        raise RowProblem(f"{RESPONSE_FORMAT}: expected {expected}, got {type_name(asked)} {shown(asked)}")
    return {"json_object": True} if kind == "json_object" else None


def asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Return whether a field changes nothing: its value is null or one of the `neutral` ones.

    Unlike in Python, 0 and False are different values here, as are 1 and True.
    """
    return value is None or any(isinstance(value, bool) == isinstance(n, bool) and value == n for n in neutral)
