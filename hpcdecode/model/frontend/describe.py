"""How a model was cut: the data of `hpcdecode split MODEL`, and its text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypedDict

import torch
from torch import fx

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, MixerShape, state_bytes
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.split import Slice, Split

Size = int | str


class WireTensor(TypedDict):
    """A tensor that a token sends to an R-rank, or gets back from there, at one layer."""

    name: str
    shape: list[Size]
    bytes_per_token: int


# The tensor's "from" says what it depends on.
CutTensor = TypedDict(
    "CutTensor", {"name": str, "from": str, "shape": list[Size], "dtype": str, "bytes_per_token": int}
)


class SliceDescription(TypedDict):
    """One slice: the graph that it runs, its weights, and what it hands on."""

    slice: int
    group: int
    calls: int
    weights: int
    weight_bytes: int
    context: list[CutTensor]
    wire: list[WireTensor]


class Description(TypedDict):
    """A model that is cut into slices."""

    model_type: str
    dtype: str
    layers: int
    groups: list[list[int]]
    slices: list[SliceDescription]
    wire_bytes_per_token: int
    kv_bytes_per_token: int
    kv_bytes_beyond_windows: int
    state_bytes: int


def describe(parts: Split, attends: Sequence[MixerShape], dtype: torch.dtype) -> Description:
    """Return slices, groups of equal slices, tensors cut and bytes per token, as plain data (JSON).

    Args:
        parts: The model.
        attends: Shape of each layer that attends or keeps a state.
        dtype: Dtype of the activations.
    """
    wire = [wire_tensors(shape, dtype) for shape in attends]
    tensors = [tensor for layer in wire for tensor in layer]
    return {
        "model_type": parts.trace.facts.model_type,
        "dtype": dtype_name(dtype),
        "layers": len(attends),
        "groups": [group.slices for group in parts.groups],
        "slices": [
            describe_slice(i, part, parts, wire[i] if i < len(wire) else []) for i, part in enumerate(parts.slices)
        ],
        "wire_bytes_per_token": sum(t["bytes_per_token"] for t in tensors),
        "kv_bytes_per_token": sum(map(kept_bytes, attends, wire)),
        "kv_bytes_beyond_windows": sum(
            kept_bytes(shape, own)
            for shape, own in zip(attends, wire, strict=True)
            if not isinstance(shape, LayerShape) or shape.kept_tokens is None
        ),
        "state_bytes": state_bytes(attends),
    }


def describe_slice(i: int, part: Slice, parts: Split, wire: list[WireTensor]) -> SliceDescription:
    """Return slice `i`, which is `part` of `parts`, as plain data; wire: the tensors of the attention after it."""
    return {
        "slice": i,
        "group": part.group,
        "calls": sum(n.op == "call_function" for n in parts.groups[part.group].graph.nodes),
        "weights": len(part.weights),
        "weight_bytes": sum(tensor_meta(n).bytes_per_token for n in part.weights),
        "context": [cut_tensor(n, parts) for n in part.context],
        "wire": wire,
    }


def kept_bytes(shape: MixerShape, wire: Sequence[WireTensor]) -> int:
    """Return the bytes of a token's `wire` tensors that an R-rank keeps: an entry is kept once for all its tokens."""
    rate = max(shape.compress_rate, 1)
    parts = {"k": 1, "v": 1, "entry": rate, "index k": rate}
    return round(sum(t["bytes_per_token"] / parts[t["name"]] for t in wire if t["name"] in parts))


def wire_tensors(shape: MixerShape, dtype: torch.dtype) -> list[WireTensor]:
    """Return the tensors that one token sends to an R-rank, and gets back, at a layer of this `shape`."""
    if isinstance(shape, RecurrentShape):
        return state_tensors(shape, dtype)
    widths = {
        "q": (shape.q_heads, shape.k_dim),
        "k": (shape.kv_heads, shape.k_dim),
        "v": (shape.kv_heads, shape.v_dim),
        "o": (shape.q_heads, shape.v_dim),
    }
    if shape.latent:
        del widths["v"]  # it is in k
    if shape.bias is not None:
        widths["biases"] = (shape.q_heads, shape.bias.dim)
    if shape.row_sinks:
        widths["sinks"] = (shape.q_heads, 1)
    if shape.compress_rate:
        widths["entry"] = (shape.kv_heads, shape.k_dim)
    if shape.indexer and (heads := shape.indexer.heads):
        dim = shape.indexer.dim
        weights = {} if shape.indexer.local else {"index weights": (heads, 1)}
        widths |= {"index q": (heads, dim), **weights, "index k": (1, dim)}
    return [
        {"name": n, "shape": ["T", h, d], "bytes_per_token": h * d * dtype.itemsize} for n, (h, d) in widths.items()
    ]


def state_tensors(shape: RecurrentShape, dtype: torch.dtype) -> list[WireTensor]:
    """Return the tensors that one token sends to, and gets back from, a layer that keeps a state."""
    names = ("", "", "values", "gates", "") if shape.compress_rate else ("q in", "k in", "v in", "decay", "beta")
    widths = dict(zip(names, shape.widths, strict=True)) | {"o": shape.out_columns}
    size = dtype.itemsize
    return [{"name": n, "shape": ["T", width], "bytes_per_token": width * size} for n, width in widths.items() if width]


def cut_tensor(node: fx.Node, parts: Split) -> CutTensor:
    """Return a tensor that crosses a cut as plain data."""
    about = tensor_meta(node)
    per_token = node is not parts.trace.logits_indices
    return {
        "name": node.name,
        "from": parts.kinds[node] if per_token else "kept tokens",
        "shape": list(about.shape),
        "dtype": dtype_name(about.dtype),
        "bytes_per_token": about.bytes_per_token if per_token else 0,
    }


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype`, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def render(data: Description) -> str:
    """Return the text for what `describe` returned: one block for each run of slices that read alike."""
    lines = [
        f"{data['model_type']}: {data['layers']} layers in {data['dtype']}, {data['layers'] + 1} slices, "
        f"{len(data['groups'])} graphs",
        f"on the wire {data['wire_bytes_per_token']:,} bytes per token over all layers, "
        f"KV cache {data['kv_bytes_per_token']:,} bytes per token",
    ]
    if data["kv_bytes_beyond_windows"] < data["kv_bytes_per_token"]:
        lines.append(f"{data['kv_bytes_beyond_windows']:,} of these bytes once it has left all windows")
    if data["state_bytes"]:
        lines.append(f"recurrent state {data['state_bytes']:,} bytes per sequence")
    for first, last in runs(data["slices"]):
        part = data["slices"][first]
        name = f"slice {first}" if first == last else f"slices {first}-{last}"
        lines.append(
            f"{name}: graph {part['group']}, {part['calls']} calls, {part['weight_bytes']:,} bytes of weights each"
        )
        if part["wire"]:
            total = sum(t["bytes_per_token"] for t in part["wire"])
            tensors = "  ".join(f"{t['name']} {shape_text(t['shape'])}" for t in part["wire"])
            lines.append(f"  wire     {total:>10,} B/token  {tensors}")
        for cut in part["context"]:
            what = f"{shape_text(cut['shape'])} {cut['dtype']} {cut['name']} ({cut['from']})"
            lines.append(f"  context  {cut['bytes_per_token']:>10,} B/token  {what}")
    return "\n".join(lines)


def runs(slices: Sequence[SliceDescription]) -> Iterator[tuple[int, int]]:
    """Yield first and last index of each run of slices that differ in their numbers and tensor names only."""
    first = 0
    for i in range(1, len(slices) + 1):
        if i == len(slices) or form(slices[i]) != form(slices[first]):
            yield first, i - 1
            first = i


def form(part: SliceDescription) -> tuple[object, ...]:
    """Return what the slices of a run have in common."""
    context = [(t["shape"], t["dtype"], t["bytes_per_token"]) for t in part["context"]]
    return part["group"], part["weight_bytes"], part["wire"], context


def shape_text(shape: Sequence[Size]) -> str:
    """Return the text of a shape, such as [T, 4, 16]."""
    return "[" + ", ".join(map(str, shape)) + "]"
