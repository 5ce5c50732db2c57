"""Traces, and where weights lie in a checkpoint, kept on disk: both take long, and depend on names and versions alone.

A file is msgpack data without code, named by a hash of all that the trace depends on. Any of them may be deleted at
any time; a new one appears by a rename, so that many ranks may write the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import os
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from threading import Timer
from typing import Any

import msgspec
import torch
from torch import Tensor, fx

from hpcdecode._version import __version__
from hpcdecode.model.frontend import ops
from hpcdecode.model.frontend.config import ModelFacts, config_file, quiet, read_config, read_json, text_config
from hpcdecode.model.frontend.meta import Meta
from hpcdecode.model.frontend.sources import Sources, find_sources
from hpcdecode.model.frontend.stated import layers_of
from hpcdecode.model.frontend.trace import Trace, trace

NAMESPACES = ("aten", "hpcdecode")
FUNCTIONS = ("getitem", "add", "sub", "mul", "floordiv")  # of the module operator
CHECKSUM_BYTES = 4
LONG = 2.0  # seconds after which a trace that is being made is announced
MAKERS = (
    "config.py",
    "stated.py",
    "trace.py",
    "kinds.py",
    "expand.py",
    "ops.py",
    "clean.py",
    "meta.py",
    "sources.py",
    "cache.py",
)


class CachedTensor(msgspec.Struct, array_like=True):
    dtype: str
    shape: list[int]
    data: bytes


class StoredNode(msgspec.Struct, array_like=True):
    """about: a size; or dtype, shape and the shape at one token of a tensor. target is empty for an input."""

    name: str
    target: str
    args: Any
    kwargs: Any
    about: str | tuple[str, list[int | str], list[int]] | None


class StoredTrace(msgspec.Struct, array_like=True):
    """Nodes are named by their place."""

    nodes: list[StoredNode]
    inputs: tuple[int, int, int, int]  # ids, positions, keep; logits
    weights: dict[int, str]
    constants: dict[int, CachedTensor]
    dtype: str
    facts: ModelFacts


class Unstorable(Exception):
    """The trace holds something that the format does not have."""


def cached_trace(path: Path, dtype: torch.dtype, announce: bool = False) -> Trace:
    """The trace of the model in `path` in `dtype`, from the cache directory if it is there; else made, and left there.

    From there it takes no code of transformers. Raises what `read_config` and `trace` raise.

    Args:
        announce: say on standard error what takes so long, if it does.
    """
    file = directory() / f"{key(path, dtype)}.trace"
    with contextlib.suppress(OSError, msgspec.MsgspecError, Unstorable):
        ops.define()
        return restored(msgspec.msgpack.decode(read(file), type=StoredTrace))
    with announced(path) if announce else contextlib.nullcontext():
        made = trace(read_config(path), dtype)
    with contextlib.suppress(OSError, Unstorable):
        write(file, msgspec.msgpack.encode(stored(made)))
    return made


@contextlib.contextmanager
def announced(path: Path) -> Iterator[None]:
    """Say on standard error that the model in `path` is being traced, if the block takes longer than LONG."""
    about = text_config(read_json(config_file(path)))
    name = (about.get("architectures") or [about.get("model_type")])[0]
    line = f"hpcdecode: tracing {name}: {layers_of(about)} layers (the first time; kept in {directory()})\n"
    timer = Timer(LONG, lambda: print(line, end="", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def cached_sources(
    path: Path, dtype: torch.dtype, keys: Sequence[str], wanted: set[str], stackable: set[str]
) -> Sources:
    """`find_sources` of the traced model in `path`, from the cache directory if they are there, likewise."""
    file = directory() / f"{key(path, dtype, *sorted(keys))}.sources"
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.msgpack.decode(read(file), type=Sources)
    with quiet():
        found = find_sources(read_config(path), dtype, keys, wanted, stackable)
    if not found.conversions:
        with contextlib.suppress(OSError):
            write(file, msgspec.msgpack.encode(found))
    return found


def directory() -> Path:
    """HPCDECODE_CACHE, else hpcdecode in the user's cache directory."""
    if own := os.environ.get("HPCDECODE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcdecode"


def key(path: Path, dtype: torch.dtype, *about: str) -> str:
    """A name for what depends on the config in `path`, `dtype`, `about` and the versions of what makes it."""
    files = [*(Path(__file__).parent / name for name in MAKERS), config_file(path)]
    versions = (__version__, torch.__version__, version("transformers"), str(dtype), *about)
    parts = [*(file.read_bytes() for file in files), *(v.encode() for v in versions)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def read(file: Path) -> bytes:
    """What `write` was given. Raises OSError, also if the file is not as it was written."""
    content = file.read_bytes()
    checksum, data = content[:CHECKSUM_BYTES], content[CHECKSUM_BYTES:]
    if zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little") != checksum:
        raise OSError(f"{file}: its checksum is not that of its content")
    return data


def write(file: Path, data: bytes) -> None:
    """Put `data` after its CRC-32 into a new file, and rename it to `file`. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".trace-")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(zlib.crc32(data).to_bytes(CHECKSUM_BYTES, "little") + data)
        os.replace(name, file)
    except OSError:
        os.unlink(name)
        raise


def stored(trace: Trace) -> StoredTrace:
    """Raises Unstorable."""
    nodes = [n for n in trace.graph.nodes if n.op != "output"]
    places = {node: i for i, node in enumerate(nodes)}
    return StoredTrace(
        [
            StoredNode(
                node.name,
                target_name(node),
                encode(node.args, places) if node.op == "call_function" else None,
                encode(dict(node.kwargs), places),
                stored_about(node.meta.get("about")),
            )
            for node in nodes
        ],
        tuple(places[n] for n in (trace.ids, trace.positions, trace.logits_indices, trace.logits)),
        {places[n]: name for n, name in trace.weights.items()},
        {places[n]: stored_tensor(t) for n, t in trace.constants.items()},
        str(trace.dtype).removeprefix("torch."),
        trace.facts,
    )


def restored(data: StoredTrace) -> Trace:
    """Raises Unstorable for a file that does not hang together."""
    graph, nodes = fx.Graph(), []
    try:
        for made in data.nodes:
            if made.target:
                args, kwargs = decode(made.args, nodes), decode(made.kwargs, nodes)
                node = graph.create_node("call_function", target_of(made.target), tuple(args), kwargs, made.name)
            else:
                node = graph.placeholder(made.name)
            node.meta = {} if made.about is None else {"about": restored_about(made.about)}
            nodes.append(node)
        ids, positions, keep, logits = (nodes[i] for i in data.inputs)
        graph.output((logits,))
        weights = {nodes[i]: name for i, name in data.weights.items()}
        constants = {nodes[i]: restored_tensor(t) for i, t in data.constants.items()}
        dtype = getattr(torch, data.dtype)
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise Unstorable from error
    attends = [n for n in nodes if n.target is torch.ops.hpcdecode.attend.default]
    return Trace(graph, ids, positions, keep, weights, constants, attends, logits, dtype, data.facts)


def target_name(node: fx.Node) -> str:
    """`aten.add.Tensor` or `operator.getitem`; empty for an input."""
    if node.op == "placeholder":
        return ""
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in NAMESPACES:
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    if name in FUNCTIONS and getattr(operator, name) is node.target:
        return f"operator.{name}"
    raise Unstorable


def target_of(name: str):
    namespace, *path = name.split(".")
    if namespace == "operator" and len(path) == 1 and path[0] in FUNCTIONS:
        return getattr(operator, path[0])
    if namespace not in NAMESPACES or len(path) != 2:
        raise Unstorable
    return getattr(getattr(getattr(torch.ops, namespace), path[0]), path[1])


def encode(arg: Any, places: dict[fx.Node, int]) -> Any:
    """Scalars as they are; whatever else as [kind, value]."""
    if arg is None or isinstance(arg, bool | int | float | str):
        return arg
    if isinstance(arg, fx.Node):
        return ["node", places[arg]]
    if isinstance(arg, tuple | list):
        return ["list", [encode(a, places) for a in arg]]
    if isinstance(arg, dict):
        return ["dict", {k: encode(v, places) for k, v in arg.items()}]
    if isinstance(arg, torch.device):
        return ["device", str(arg)]
    if isinstance(arg, torch.dtype | torch.layout | torch.memory_format):
        return ["torch", str(arg).removeprefix("torch.")]
    raise Unstorable


def decode(arg: Any, nodes: list[fx.Node]) -> Any:
    if not isinstance(arg, list):
        return arg
    kind, value = arg
    if kind == "node":
        return nodes[value]
    if kind == "list":
        return [decode(v, nodes) for v in value]
    if kind == "dict":
        return {k: decode(v, nodes) for k, v in value.items()}
    if kind == "device":
        return torch.device(value)
    found = getattr(torch, value) if kind == "torch" else None
    if not isinstance(found, torch.dtype | torch.layout | torch.memory_format):
        raise Unstorable
    return found


def stored_about(about: Meta | str | None) -> Any:
    if not isinstance(about, Meta):
        return about
    return str(about.dtype).removeprefix("torch."), list(about.shape), list(about.one_token)


def restored_about(about: Any) -> Meta | str:
    if isinstance(about, str):
        return about
    dtype, shape, one_token = about
    return Meta(getattr(torch, dtype), tuple(shape), tuple(one_token))


def stored_tensor(tensor: Tensor) -> CachedTensor:
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return CachedTensor(str(tensor.dtype).removeprefix("torch."), list(tensor.shape), flat.numpy().tobytes())


def restored_tensor(stored: CachedTensor) -> Tensor:
    if not stored.data:
        return torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    return torch.frombuffer(bytearray(stored.data), dtype=getattr(torch, stored.dtype)).view(stored.shape)
