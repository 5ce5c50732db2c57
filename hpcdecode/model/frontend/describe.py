"""What was cut where: the data behind `hpcdecode split MODEL`, and its text."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import fx

from hpcdecode.attention.base import LayerShape
from hpcdecode.model.frontend.meta import meta
from hpcdecode.model.frontend.split import Split


def describe(parts: Split, attends: tuple[LayerShape, ...], dtype: torch.dtype) -> dict:
    """Slices, groups of equal slices, tensors cut and bytes per token, as plain data (JSON)."""
    wire = [wire_tensors(shape, dtype) for shape in attends]
    slices = []
    for i, part in enumerate(parts.slices):
        slices.append(
            {
                "slice": i,
                "group": part.group,
                "calls": sum(n.op == "call_function" for n in parts.groups[part.group].graph.nodes),
                "weights": len(part.weights),
                "weight_bytes": sum(meta(n).bytes_per_token for n in part.weights),
                "context": [cut_tensor(n, parts) for n in part.context],
                "wire": wire[i] if i < len(wire) else [],
            }
        )
    return {
        "model_type": parts.trace.facts.model_type,
        "dtype": str(dtype).removeprefix("torch."),
        "layers": len(attends),
        "groups": [group.slices for group in parts.groups],
        "slices": slices,
        "wire_bytes_per_token": sum(t["bytes_per_token"] for layer in wire for t in layer),
        "kv_bytes_per_token": sum(t["bytes_per_token"] for layer in wire for t in layer if t["name"] in "kv"),
    }


def wire_tensors(shape: LayerShape, dtype: torch.dtype) -> list[dict]:
    """What one token sends to the R-part and back at one layer."""
    widths = {
        "q": (shape.q_heads, shape.k_dim),
        "k": (shape.kv_heads, shape.k_dim),
        "v": (shape.kv_heads, shape.v_dim),
        "o": (shape.q_heads, shape.v_dim),
    }
    return [
        {"name": n, "shape": ["T", h, d], "bytes_per_token": h * d * dtype.itemsize} for n, (h, d) in widths.items()
    ]


def cut_tensor(node: fx.Node, parts: Split) -> dict:
    about = meta(node)
    per_token = node is not parts.trace.logits_indices
    return {
        "name": node.name,
        "from": parts.kinds[node] if per_token else "kept tokens",
        "shape": list(about.shape),
        "dtype": str(about.dtype).removeprefix("torch."),
        "bytes_per_token": about.bytes_per_token if per_token else 0,
    }


def render(data: dict) -> str:
    """`describe`'s data as text: one block for each run of slices that read alike."""
    lines = [
        f"{data['model_type']}: {data['layers']} layers in {data['dtype']}, {data['layers'] + 1} slices, "
        f"{len(data['groups'])} graphs",
        f"on the wire {data['wire_bytes_per_token']:,} bytes per token over all layers, "
        f"KV cache {data['kv_bytes_per_token']:,} bytes per token",
    ]
    for first, last in runs(data["slices"]):
        part = data["slices"][first]
        name = f"slice {first}" if first == last else f"slices {first}-{last}"
        lines.append(
            f"{name}: graph {part['group']}, {part['calls']} calls, {part['weight_bytes']:,} bytes of weights each"
        )
        if part["wire"]:
            total = sum(t["bytes_per_token"] for t in part["wire"])
            lines.append(
                f"  wire     {total:>10,} B/token  "
                + "  ".join(f"{t['name']} {show(t['shape'])}" for t in part["wire"])
            )
        for t in part["context"]:
            what = f"{show(t['shape'])} {t['dtype']} {t['name']} ({t['from']})"
            lines.append(f"  context  {t['bytes_per_token']:>10,} B/token  {what}")
    return "\n".join(lines)


def runs(slices: list[dict]) -> Iterable[tuple[int, int]]:
    """First and last index of each run of slices that differ in their numbers and tensor names only."""
    first = 0
    for i in range(1, len(slices) + 1):
        if i == len(slices) or alike(slices[i]) != alike(slices[first]):
            yield first, i - 1
            first = i


def alike(part: dict) -> tuple:
    context = [(t["shape"], t["dtype"], t["bytes_per_token"]) for t in part["context"]]
    return part["group"], part["weight_bytes"], part["wire"], context


def show(shape: list) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"
