"""`hpcdecode bench guesses`: decoding with speculative decoding, against decoding without, of a trained model.

Rows ask for what is known of functions of Python's standard library: `json` for their names and types as JSON of one
schema, `edits` for their code with type hints, `answers` for what they do, in words. All ways take turns in one
process. Every pass has rows of its own, as what earlier calls generated is known; the time of their prompts, which is
that of a call for one token, does not count. Tokens must be the same.
"""

from __future__ import annotations

import argparse
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from hpcdecode import LLM, SamplingParams
from hpcdecode.bench.edits import ASKED, encoded, functions
from hpcdecode.bench.output import Case, Report
from hpcdecode.errors import InvariantViolation, UserError
from hpcdecode.report.benchmark import case, machine, seconds_of
from hpcdecode.requests.speculative import DRAFT_MODEL, LOOKUPS, MTP
from hpcdecode.system.model_path import find_model

_NONE = "no guesses"
_EXPLAINED = "What does this Python code do, and what is it good for?\n\n```python\n{}\n```"
_DESCRIBED = "Describe this Python code as JSON with the keys {}:\n\n```python\n{}\n```"
_TEXT, _NAME = ({"type": "string", "maxLength": longest} for longest in (120, 30))
_PROPERTIES: dict[str, dict[str, Any]] = {
    "function_name": _NAME,
    "short_description": _TEXT,
    "programming_language": {"enum": ["Python", "C", "Java"]},
    "is_documented": {"type": "boolean"},
    "number_of_parameters": {"type": "integer"},
    "parameter_names": {"type": "array", "items": _NAME, "maxItems": 5},
    "raises_exceptions": {"type": "boolean"},
}
SCHEMA = {
    "type": "object",
    "properties": _PROPERTIES,
    "required": list(_PROPERTIES),
    "additionalProperties": False,
}
WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "json": (_DESCRIBED.format(", ".join(_PROPERTIES), "{}"), {"structured_outputs": {"json": SCHEMA}}),
    "edits": (ASKED, {"ignore_eos": True}),
    "answers": (_EXPLAINED, {"ignore_eos": True}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this benchmark."""
    parser.add_argument("--model", metavar="DIR", help="trained model (as for generate, else smollm2)")
    help = "second model of the method draft_model (the model itself)"
    parser.add_argument("--draft-model", metavar="DIR", help=help)
    help = "form of its weights, as --weights of generate (%(default)s)"
    parser.add_argument("--draft-weights", metavar="FORM", default="int8", help=help)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), help="(default: all)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16], help="(default: 1 4 16)")
    parser.add_argument("--max-tokens", type=int, default=160, help="of a row (%(default)s)")
    parser.add_argument("--passes", type=int, default=3, help="of each way (%(default)s)")


def run(args: argparse.Namespace) -> Report:
    """Measure every workload with every number of rows.

    Raises:
        UserError: If there is no model, or a number is not positive.
    """
    for flag, least in (("rows", min(args.rows)), ("max-tokens", args.max_tokens - 1), ("passes", args.passes)):
        if least < 1:
            raise UserError(f"--{flag}: expected {1 + (flag == 'max-tokens')} or more, got {least}")
    if (args.passes + 1) * max(args.rows) > (known := len(functions())):
        got = f"got {args.passes} passes and one before them of {max(args.rows)}"
        raise UserError(f"--rows: expected at most {known} of all passes together, functions of their own, {got}")
    path = find_model(args.model or os.environ.get("HPCDECODE_MODEL") or "smollm2", {})
    ways = {_NONE: LLM(path)} | {method: LLM(path, speculative_config={"method": method}) for method in LOOKUPS}
    second = {"model": args.draft_model or path, "quantization": args.draft_weights}
    ways[f"{DRAFT_MODEL} in {args.draft_weights}"] = LLM(path, speculative_config=second)
    with suppress(UserError):  # its checkpoint has no such layer
        ways[MTP] = LLM(path, speculative_config={"method": MTP})
    cases: list[Case] = []
    for workload in args.workload:
        for rows in args.rows:
            cases += measure(Path(path), ways, workload, rows, args.max_tokens, args.passes)
    return {"bench": "guesses", "machine": machine(), "cases": cases}


def measure(model: Path, ways: dict[str, LLM], workload: str, rows: int, most: int, passes: int) -> list[Case]:
    """Return tokens a second of each way.

    Args:
        model: Directory or GGUF file.
        ways: By name, the one without guesses first.
        workload: One of WORKLOADS.
        rows: Number of rows.
        most: Tokens of a row.
        passes: Of each way.

    Raises:
        InvariantViolation: If guesses change tokens.
    """
    text, params = WORKLOADS[workload]
    texts = functions()
    made: dict[str, list[list[int]]] = {}
    asked = tuple(text.format(texts[i]) for i in range((passes + 1) * rows))
    given = [{"prompt_token_ids": ids} for ids in encoded(model, asked)]

    def decode(name: str, number: int, tokens: int) -> None:
        prompts = given[number * rows : (number + 1) * rows]
        outputs = ways[name].generate(prompts, SamplingParams(max_tokens=tokens, **params), use_tqdm=False)
        made[name] = [list(output.outputs[0].token_ids) for output in outputs]

    for name in ways:
        decode(name, 0, most)  # finds memory, and what grammars need
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(1, passes + 1):
        for name in ways:
            prefill = seconds_of(partial(decode, name, number, 1))
            seconds = seconds_of(partial(decode, name, number, most)) - prefill
            if made[name] != made[_NONE]:
                raise InvariantViolation("guesses change no token", f"{workload}, {rows} rows: {name} has others")
            speeds[name].append((sum(map(len, made[name])) - rows) / seconds)
    return [
        case(
            f"{workload}, {rows} rows, {name}",
            own,
            "tokens/s",
            _NONE,
            [one / none for none, one in zip(speeds[_NONE], own, strict=True)],
        )
        for name, own in speeds.items()
    ]
