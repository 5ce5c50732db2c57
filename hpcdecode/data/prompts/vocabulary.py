"""Tokenizer files of a model directory: what transformers makes of them, and what ends a sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcdecode.errors import RowProblem, UserError
from hpcdecode.model.frontend.config import quiet, read_json

# Any one of these groups is enough for transformers to build a tokenizer.
VOCABULARY_FILES = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("tekken.json",),
)


def load_backend(folder: Path) -> Any:
    """Return transformers' tokenizer.

    The model's own config takes long to import; it is left out if the tokenizer's class is stated.
    """
    from transformers import AutoTokenizer, PreTrainedConfig

    stated, options = read_json(folder / "tokenizer_config.json"), {}
    if stated.get("tokenizer_class") and "auto_map" not in stated:
        with quiet():
            options["config"] = PreTrainedConfig.from_pretrained(folder)
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False, **options)


def template_of(backend: Any) -> str:
    """Return the source of the chat template; of several, the one named default."""
    template = getattr(backend, "chat_template", None)
    if isinstance(template, dict):
        if "default" not in template:
            names = ", ".join(sorted(template))
            raise RowProblem(f"messages: expected a model with a chat template named default, got {names}; use prompt")
        return template["default"]
    if not template:
        raise RowProblem("messages: expected a model with a chat template, this one has none; use prompt")
    return template


def require_files(folder: Path) -> None:
    """Raise UserError unless a tokenizer can be made of what lies in `folder`."""
    if not folder.is_dir():
        raise UserError(f"model {folder}: expected a directory with a Hugging Face model, found none")
    if not any(all((folder / name).is_file() for name in group) for group in VOCABULARY_FILES):
        expected = ", or ".join(" and ".join(group) for group in VOCABULARY_FILES)
        raise UserError(f"tokenizer of {folder}: expected {expected}, found none; copy the tokenizer's files there")


def eos_of(folder: Path, config: dict[str, Any], backend: Any, vocab_size: int) -> frozenset[int]:
    """Return what ends a sequence, from the first of three places that states it.

    Raises UserError if that is not one or several token ids of the vocabulary.
    """
    stated = {
        "generation_config.json": read_json(folder / "generation_config.json").get("eos_token_id"),
        "config.json": config.get("eos_token_id"),
        "tokenizer_config.json": backend.eos_token_id,
    }
    for name, value in stated.items():
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if any(type(i) is not int or not 0 <= i < vocab_size for i in ids):
                expected = f"eos_token_id: expected token ids in [0, {vocab_size}), got {value!r:.100}"
                raise UserError(f"{folder / name}: {expected}; mend it there")
            return frozenset(ids)
    return frozenset()
