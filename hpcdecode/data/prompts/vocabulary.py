"""Loads the tokenizer files of a model directory, with its chat template and end-of-sequence tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdecode.errors import RowProblem, UserError
from hpcdecode.model.frontend.config import read_json
from hpcdecode.model.frontend.quiet import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Backend

# Any one of these groups of files is enough for transformers to build a tokenizer.
VOCABULARY_FILES = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
    ("spiece.model",),
    ("sentencepiece.bpe.model",),
    ("tekken.json",),
)

NO_TOKENIZER = "prompt_token_ids, as there is no tokenizer with --skip-tokenizer-init"

# What AutoTokenizer reads of a config. The class of all configs refuses rotary scaling, as it has no length to scale.
OF_TOKENIZERS = ("model_type", "model_name", "tokenizer_class", "architectures", "auto_map")


class NoTokenizer:
    """Stands for the tokenizer of a model that does without one. It has what hpcdecode uses of transformers'."""

    chat_template = bos_token_id = eos_token_id = None
    all_special_tokens: Sequence[str] = ()

    def __call__(self, texts: list[str], **options: Any) -> Any:
        """Refuse texts."""
        raise ValueError(f"expected {NO_TOKENIZER}")

    def __len__(self) -> int:
        return 0

    def decode(self, ids: list[int], **options: Any) -> str:
        """Return an empty text."""
        return ""


def load_backend(folder: Path) -> Backend:
    """Return transformers' tokenizer of the model directory `folder`.

    If the files state the tokenizer's class, the model's config class is not imported, since that takes seconds.

    Raises:
        Exception: The files are broken, or need code of their own.
    """
    from transformers import AutoTokenizer, PreTrainedConfig

    stated = read_json(folder / "tokenizer_config.json")
    options: dict[str, Any] = {}
    if stated.get("tokenizer_class") and "auto_map" not in stated:
        with quiet():
            known = read_json(folder / "config.json")
            options["config"] = PreTrainedConfig(**{name: known[name] for name in OF_TOKENIZERS if name in known})
    load: Callable[..., Backend] = AutoTokenizer.from_pretrained
    backend = load(str(folder), local_files_only=True, trust_remote_code=False, **options)
    if not backend.chat_template:  # of models with towers the processor may have it
        template = read_json(folder / "chat_template.json").get("chat_template")
        backend.chat_template = template if isinstance(template, str) else None
    return backend


def template_of(backend: Backend) -> str:
    """Return the source of the chat template; of several, the one named default.

    Raises:
        RowProblem: There is no template, or none named default.
    """
    template: str | dict[str, str] | None = getattr(backend, "chat_template", None)
    if isinstance(template, dict):
        if "default" not in template:
            names = ", ".join(sorted(template))
            raise RowProblem(f"messages: expected a model with a chat template named default, got {names}; use prompt")
        return template["default"]
    if not template:
        raise RowProblem("messages: expected a model with a chat template, this one has none; use prompt")
    return template


def require_files(folder: Path) -> None:
    """Raise UserError unless `folder` contains the files of a tokenizer."""
    if not folder.is_dir():
        raise UserError(f"model {folder}: expected a directory with a Hugging Face model, found none")
    if not any(all((folder / name).is_file() for name in group) for group in VOCABULARY_FILES):
        expected = ", or ".join(" and ".join(group) for group in VOCABULARY_FILES)
        raise UserError(
            f"tokenizer of {folder}: expected {expected}, found none; copy the tokenizer's files there, or generate "
            "from prompt_token_ids with --skip-tokenizer-init"
        )


def eos_of(folder: Path, config: dict[str, Any], backend: Backend, vocab_size: int) -> frozenset[int]:
    """Return the end-of-sequence token ids of a model; none if no file states them.

    They come from generation_config.json, else from config.json, else from the tokenizer.

    Args:
        folder: Model directory.
        config: Content of its config.json.
        backend: Its tokenizer.
        vocab_size: Size of the vocabulary.

    Raises:
        UserError: The first file that states them has something else than token ids of the vocabulary.
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
