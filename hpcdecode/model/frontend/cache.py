"""Keep on disk what takes long to make: traces, and where the weights of a model lie in a checkpoint.

A file is msgpack data without code, named by a hash of all that its content depends on. Any of them may be deleted at
any time. A new file appears by a rename, so that many ranks may write the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from threading import Timer

import msgspec
import torch

from hpcdecode._version import __version__
from hpcdecode.errors import UserError
from hpcdecode.model.frontend import ops
from hpcdecode.model.frontend.config import config_file, read_config, read_json, text_config, unquantised
from hpcdecode.model.frontend.independence import check_independence
from hpcdecode.model.frontend.mtp import mtp_sources
from hpcdecode.model.frontend.quiet import quiet
from hpcdecode.model.frontend.sources import Sources, find_sources
from hpcdecode.model.frontend.stated import layers_of
from hpcdecode.model.frontend.trace import Trace, trace
from hpcdecode.model.frontend.trace_file import StoredTrace, Unstorable, restored, stored
from hpcdecode.system.kept import directory

CHECKSUM_BYTES = 4
logger = logging.getLogger(__name__)
LONG = 2.0  # seconds after which a trace that is being made is announced


def cached_trace(path: Path, dtype: torch.dtype, announce: bool = False, mtp: bool = False) -> Trace:
    """Return the trace of a model: from the cache directory, or else made and kept there.

    A trace from the cache directory takes no code of transformers. Raises what `read_config`, `trace` and
    `check_independence` raise.

    Args:
        path: Model directory.
        dtype: Dtype of the parameters.
        announce: Whether to log that a trace is being made, if that takes long.
        mtp: Whether to trace the model's layer for multi-token prediction, in place of the others.
    """
    file = directory() / f"{key(path, dtype)}{'.mtp' * mtp}.trace"
    with contextlib.suppress(OSError, msgspec.MsgspecError, Unstorable):
        ops.define()
        return restored(msgspec.msgpack.decode(read(file), type=StoredTrace))
    with announced(path) if announce else contextlib.nullcontext():
        made = trace(read_config(path), dtype, mtp=mtp)
        check_independence(made)
    with contextlib.suppress(OSError, Unstorable):
        write(file, msgspec.msgpack.encode(stored(made)))
    return made


@contextlib.contextmanager
def announced(path: Path) -> Iterator[None]:
    """Log that the model in `path` is being traced, if the block takes longer than LONG."""
    about = text_config(read_json(config_file(path)))
    name = (about.get("architectures") or [about.get("model_type")])[0]
    line = f"hpcdecode: tracing {name}: {layers_of(about)} layers (the first time; kept in {directory()})"
    timer = Timer(LONG, logger.info, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def cached_sources(
    path: Path, dtype: torch.dtype, keys: Sequence[str], wanted: set[str], stackable: set[str], mtp: bool = False
) -> Sources:
    """Return where a model's weights come from: from the cache directory, or else found and kept there.

    Args:
        path: Model directory.
        dtype: Dtype of the parameters.
        keys: Keys of the checkpoint's tensors.
        wanted: Names of the weights.
        stackable: Weights of experts that may stay separate tensors.
        mtp: Whether they are of its layer for multi-token prediction.

    Raises:
        UserError: If the checkpoint lacks tensors of an expert.
    """
    file = directory() / f"{key(path, dtype, *sorted(keys), *sorted(wanted))}{'.mtp' * mtp}.sources"
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.msgpack.decode(read(file), type=Sources)
    config = read_config(path)
    try:
        with quiet():
            found = (mtp_sources if mtp else find_sources)(config, dtype, keys, wanted, stackable)
    except UserError as e:
        raise UserError(f"{path}: {e}") from e
    if not found.conversions:
        with contextlib.suppress(OSError):
            write(file, msgspec.msgpack.encode(found))
    return found


def key(path: Path, dtype: torch.dtype, *about: str) -> str:
    """Return a name that changes with whatever a trace depends on.

    That is config.json in `path`, but for what it states of quantised weights, `dtype`, `about`, the modules of this
    folder, and the versions of what they use.
    """
    files = sorted(Path(__file__).parent.glob("*.py"))
    file = config_file(path)
    try:
        config = json.dumps(unquantised(read_json(file)), sort_keys=True).encode()
    except RecursionError:
        config = file.read_bytes()
    versions = (__version__, torch.__version__, version("transformers"), str(dtype), *about)
    parts = [*(file.read_bytes() for file in files), config, *(v.encode() for v in versions)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def read(file: Path) -> bytes:
    """Return what `write` was given. Raise OSError if the file cannot be read or is damaged."""
    content = file.read_bytes()
    checksum, data = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
    if zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little") != checksum:
        raise OSError(f"{file}: its checksum is not that of its content")
    return data


def write(file: Path, data: bytes) -> None:
    """Write `data` after its CRC-32 to a new file, and rename that to `file`. Raise OSError if that fails."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".trace-")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little") + data)
        os.replace(name, file)
    except OSError:
        os.unlink(name)
        raise
