"""The name of the results of a job that gives none."""

from __future__ import annotations

from collections.abc import Sequence
from glob import has_magic
from pathlib import Path

from hpcdecode.config import STDIN
from hpcdecode.errors import UserError
from hpcdecode.requests.shard import Shard


def default_output(prompts: Sequence[str], shard: Shard | None = None) -> str:
    """Return the default name of the results in the working directory.

    `prompts.jsonl.gz` becomes `prompts.h5`, or `prompts.0-of-4.h5` of a shard.

    Raises:
        UserError: If no name follows from the prompt files.
    """
    name = Path(prompts[0]).name.removesuffix(".gz").removesuffix(".zst")
    if len(prompts) > 1 or prompts[0] == STDIN or has_magic(name):
        raise UserError("expected -o OUT.h5 for several prompt files or standard input, got none", everywhere=True)
    return str(Path(name).with_suffix(f".{shard.index}-of-{shard.count}.h5" if shard else ".h5"))
