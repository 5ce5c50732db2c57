"""`hpcdecode export`: results as JSON Lines, Parquet or the output of an OpenAI batch."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hpcdecode.data.durable import publish, write_errors
from hpcdecode.data.layout import ROW_COLUMNS, STRING
from hpcdecode.data.read import COLUMNS, Results, rows_of
from hpcdecode.data.tables import optional
from hpcdecode.errors import UserError

FORMATS = {"jsonl": ".results.jsonl", "parquet": ".results.parquet", "openai-batch": ".batch.jsonl"}
OBJECTS = {"chat": "chat.completion", "completions": "text_completion"}  # of the answers to an OpenAI batch
_COMPARE = {
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*(\w+)\s*(!=|>=|<=|=|>|<)\s*(.*?)\s*")

Stretch = dict[str, np.ndarray]


def export(
    path: str,
    out: str | None,
    kind: str,
    *,
    columns: Seq[str] = COLUMNS,
    where: Seq[str] = (),
    endpoint: str = "chat",
    overwrite: bool = False,
) -> Path:
    """Write the rows of a results file that meet all conditions `where`, in order; returns the file written.

    where: such as `finish_reason=stop` or `line>=100`. endpoint: of the requests that an OpenAI batch answers; rows
    that could not be used are lines with an `error`. out: a new file, or one to `overwrite`. Raises UserError for
    unknown columns, conditions and files.
    """
    target = Path(out or Path(path).with_suffix(FORMATS[kind]).name)
    if target.exists() and (not overwrite or (os.path.exists(path) and os.path.samefile(target, path))):
        raise UserError(f"{target}: exists already; use --overwrite to replace it, or choose another -o")
    tests = [_condition(text) for text in where]
    _require_columns(columns)
    wanted = COLUMNS if kind == "openai-batch" else tuple(columns)
    with Results(path) as results, write_errors(target, "free some space"):
        stretches = _selected(results, wanted, tests)
        temporary = target.with_name(target.name + ".tmp")
        if kind == "parquet":
            _write_parquet(temporary, stretches, wanted, str(target))
        else:
            lines = _jsonl(stretches) if kind == "jsonl" else _batch(results, stretches, endpoint)
            with open(temporary, "wb") as file:
                file.writelines(msgspec.json.encode(line, enc_hook=_plain) + b"\n" for line in lines)
        publish(temporary, target)
    return target


def _selected(results: Results, columns: Seq[str], tests: Seq[tuple[str, Callable]]) -> Iterator[Stretch]:
    needed = dict.fromkeys([*columns, *(name for name, _ in tests)])
    for stretch in results.stretches(list(needed)):
        keep = np.ones(len(next(iter(stretch.values()))), bool)
        for name, test in tests:
            keep &= test(stretch[name])
        yield {name: stretch[name][keep] for name in columns}


def _condition(text: str) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    match = _CONDITION.fullmatch(text)
    if not match:
        raise UserError(f"--where {text}: expected COLUMN, one of {' '.join(_COMPARE)}, and a value")
    name, sign, value = match.groups()
    if name not in ROW_COLUMNS:
        raise UserError(f"--where {text}: expected a column of {', '.join(ROW_COLUMNS)}, got {name!r}")
    if ROW_COLUMNS[name] is not STRING and name != "finish_reason":
        try:
            value = float(value)
        except ValueError:
            raise UserError(f"--where {text}: expected a number for {name}, got {value!r}") from None
    return name, lambda values: np.asarray(_COMPARE[sign](values, value), bool)


def _require_columns(columns: Seq[str]) -> None:
    unknown = [name for name in columns if name not in COLUMNS]
    if unknown or not columns:
        raise UserError(f"--columns: expected some of {', '.join(COLUMNS)}, got {', '.join(unknown) or 'none'}")


def _jsonl(stretches: Iterator[Stretch]) -> Iterator[dict[str, Any]]:
    for stretch in stretches:
        yield from rows_of(stretch)


def _batch(results: Results, stretches: Iterator[Stretch], endpoint: str) -> Iterator[dict[str, Any]]:
    """One line a request, by line of the prompt file: answers, and errors among them."""
    model = Path(results.attributes.get("model", {}).get("path", "")).name
    errors = iter(results.errors())
    error = next(errors, None)
    for line, samples in groupby(_jsonl(stretches), key=operator.itemgetter("line")):
        while error is not None and error["line"] < line:
            yield _refusal(error)
            error = next(errors, None)
        yield _answer(list(samples), model, endpoint)
    while error is not None:
        yield _refusal(error)
        error = next(errors, None)


def _answer(samples: list[dict[str, Any]], model: str, endpoint: str) -> dict[str, Any]:
    first, made = samples[0], sum(len(s["token_ids"]) for s in samples)
    key = f"hpcdecode-{first['line']}"
    body = {
        "id": key,
        "object": OBJECTS[endpoint],
        "created": int(first["finished_at"]),
        "model": model,
        "choices": [_choice(s, endpoint) for s in samples],
        "usage": {
            "prompt_tokens": first["prompt_tokens"],
            "completion_tokens": made,
            "total_tokens": first["prompt_tokens"] + made,
        },
    }
    response = {"status_code": 200, "request_id": key, "body": body}
    return {"id": key, "custom_id": first["id"], "response": response, "error": None}


def _choice(sample: dict[str, Any], endpoint: str) -> dict[str, Any]:
    text = sample["text"]
    said = {"message": {"role": "assistant", "content": text}} if endpoint == "chat" else {"text": text}
    return {"index": sample["sample"], **said, "logprobs": None, "finish_reason": sample["finish_reason"]}


def _refusal(error: dict[str, Any]) -> dict[str, Any]:
    reason = {"code": "invalid_request", "message": error["reason"]}
    return {"id": f"hpcdecode-{error['line']}", "custom_id": error["id"], "response": None, "error": reason}


def _plain(value: Any) -> Any:
    return value.tolist()  # numpy's scalars and arrays


def _write_parquet(temporary: Path, stretches: Iterator[Stretch], columns: Seq[str], target: str) -> None:
    pyarrow, parquet = (optional(m, target, "parquet") for m in ("pyarrow", "pyarrow.parquet"))
    kinds = {"token_ids": pyarrow.list_(pyarrow.int32()), "finish_reason": pyarrow.string()}
    for name, kind in ROW_COLUMNS.items():
        kinds.setdefault(name, pyarrow.string() if kind is STRING else pyarrow.from_numpy_dtype(kind))
    schema = pyarrow.schema([(name, kinds[name]) for name in columns])
    with parquet.ParquetWriter(temporary, schema) as writer:
        for stretch in stretches:
            arrays = [pyarrow.array(stretch[name], kinds[name], from_pandas=False) for name in columns]
            writer.write_batch(pyarrow.record_batch(arrays, schema=schema))
