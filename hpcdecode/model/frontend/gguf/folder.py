"""The model directory that stands for GGUF files: config, tokenizer, and links to the files.

It is made once and kept in the cache directory, named by a hash of all that it depends on.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hpcdecode._version import __version__
from hpcdecode.errors import UserError, first_line
from hpcdecode.model.frontend.gguf.config import CONFIGS, MISREAD, stated_by
from hpcdecode.model.frontend.gguf.header import GgufHeader
from hpcdecode.model.frontend.gguf.rope import FREQUENCIES
from hpcdecode.model.frontend.gguf.splits import set_split
from hpcdecode.model.frontend.gguf.tables import table_of
from hpcdecode.model.frontend.quiet import quiet
from hpcdecode.system.kept import directory

ENDING = ".gguf"
PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
LINKS = "weights-*-of-*.gguf"  # names of the links in the directory
MOST_PARTS = 1024
MOST_FREQUENCY_BYTES = 1 << 20
UNREAD = MISREAD | CONFIGS.keys()  # architectures whose config transformers cannot read
MAKERS = tuple(sorted(file.name for file in Path(__file__).parent.glob("*.py")))  # modules that it depends on


def model_folder(path: str | os.PathLike[str]) -> Path:
    """Return the model directory `path`, or the one that stands for the GGUF file `path`.

    Raises:
        UserError: If the GGUF file is damaged or of a model that is not known, or if the directory cannot be made.
    """
    found = Path(path)
    if found.suffix != ENDING or found.is_dir():
        return found
    try:
        files = [file.resolve() for file in part_files(found)]
        times = tuple((file.stat().st_size, file.stat().st_mtime_ns) for file in files)
    except OSError as e:
        raise UserError(f"model file {found} cannot be read: {first_line(e)}; give a GGUF file") from e
    return kept_folder(tuple(files), times, str(directory()))


def gguf_files(folder: Path) -> list[Path]:
    """Return the GGUF files that a directory made by `model_folder` stands for; none for other directories."""
    return sorted(folder.glob(LINKS))


def part_files(path: Path) -> list[Path]:
    """Return the files of a model, given any of them: that file, or all parts by their names."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= count <= MOST_PARTS:
        raise UserError(f"{path}: expected a name that states 1 to {MOST_PARTS} parts, got {count}")
    return [path.with_name(f"{match[1]}-{i:05}-of-{count:05}{ENDING}") for i in range(1, count + 1)]


@lru_cache(maxsize=16)
def kept_folder(files: tuple[Path, ...], times: tuple[tuple[int, int], ...], kept: str) -> Path:
    """Return the directory for GGUF files, made unless the cache directory `kept` has it.

    Args:
        files: The files.
        times: Size and time of each; another time, another directory is looked for.
        kept: The cache directory.
    """
    from hpcdecode.model.frontend.gguf.tensors import read_headers  # imports torch, which takes seconds

    headers = read_headers(files)
    folder = Path(kept) / f"gguf-{key_of(headers)}"
    if (folder / "config.json").is_file():
        return folder
    try:
        Path(kept).mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=kept, prefix=".gguf-"))
        try:
            fill(made, headers)
            os.rename(made, folder)
        except OSError:
            if not (folder / "config.json").is_file():  # else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as e:
        raise UserError(
            f"{files[0]}: expected a cache directory for its config and tokenizer, got: {first_line(e)}; let "
            "HPCDECODE_CACHE name one that can be written to"
        ) from e
    return folder


def key_of(headers: Sequence[GgufHeader]) -> str:
    """Return a name that changes with whatever the directory depends on."""
    digest = hashlib.sha256()
    for header in headers:
        with open(header.file, "rb") as file:
            digest.update(str(header.file).encode() + b"\0" + file.read(header.nbytes))
            if entry := header.tensors.get(FREQUENCIES):  # which the config depends on
                file.seek(entry.first)
                digest.update(file.read(min(entry.nbytes, MOST_FREQUENCY_BYTES)))
    for name in MAKERS:
        digest.update((Path(__file__).parent / name).read_bytes())
    digest.update("\0".join((__version__, version("transformers"), version("gguf"))).encode())
    return digest.hexdigest()[:32]


def fill(folder: Path, headers: Sequence[GgufHeader]) -> None:
    """Write config, tokenizer and links into `folder`."""
    with quiet():
        config = stated_by(headers)
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        write_tokenizer(folder, headers[0])
    if ends := end_tokens(headers[0]):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")
    for i, header in enumerate(headers, 1):
        os.symlink(header.file, folder / f"weights-{i:05}-of-{len(headers):05}{ENDING}")


def write_tokenizer(folder: Path, header: GgufHeader) -> None:
    """Write the tokenizer of a GGUF file as transformers converts it, with its chat template, into `folder`."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file, (architecture, _) = header.file, table_of(header)
    kind: Any = PreTrainedTokenizerFast if architecture in UNREAD else AutoTokenizer  # which reads the config first
    try:
        options: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
        tokenizer = kind.from_pretrained(str(file.parent), **options)
        set_split(tokenizer, header, known_alone=architecture in UNREAD)
        tokenizer.save_pretrained(str(folder))
    except (OSError, UserError):
        raise
    except Exception as e:
        raise UserError(
            f"{file}: expected a tokenizer that transformers can convert, got: {first_line(e)}; give the model's "
            "directory in Hugging Face format"
        ) from e


def end_tokens(header: GgufHeader) -> list[int]:
    """Return the tokens that end a text or a turn."""
    stated = (header.values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return sorted({token for token in stated if type(token) is int})
