"""The checkpoint of the sequences in flight: written with commits, and read when their job is resumed."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hpcdecode.data.results.seal import Damaged, sealed, unsealed
from hpcdecode.requests.prompt import Unfinished
from hpcdecode.system.durable import write_whole

UNFINISHED = "unfinished.msgpack"  # in the folder of parts


def save_unfinished(parts: Path, sequences: list[Unfinished], job: str) -> None:
    """Replace the checkpoint; durable on return.

    Args:
        parts: Folder of parts.
        sequences: The sequences in flight. Of several entries of one sequence, the last one counts.
        job: Name of the job.

    Raises:
        OSError: The disk refuses it.
    """
    write_whole(parts / UNFINISHED, sealed(msgspec.msgpack.encode(sequences), job))


def load_unfinished(parts: Path, job: str) -> dict[int, dict[int, Unfinished]]:
    """Return the sequences of the checkpoint by line and sample; none if there is no checkpoint.

    Args:
        parts: Folder of parts.
        job: Name of the job.

    Raises:
        Damaged: The checkpoint is damaged, or belongs to another job.
        OSError: It cannot be read.
    """
    try:
        data, owner = unsealed(parts / UNFINISHED)
        sequences = msgspec.msgpack.decode(data, type=list[Unfinished])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as e:
        raise Damaged(str(e)) from e
    if owner != job:
        raise Damaged("it belongs to another job")
    found: dict[int, dict[int, Unfinished]] = {}
    for sequence in sequences:
        found.setdefault(sequence.line, {})[sequence.sample] = sequence
    return found
