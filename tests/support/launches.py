"""What a device is told to do in a slice or in sampling, counted on tensors of the CPU.

`python -m tests.support.launches FOLDER` prints kernels and views of a layer as it is traced and as it runs on devices.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcdecode.model import load_split
from hpcdecode.model.lower.compile import compile_graph, copied, runnable
from hpcdecode.model.lower.recipe import Recipe
from hpcdecode.model.run import bound_slice
from tests.support.models import build

aten = torch.ops.aten
WAITS = {"tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique"}
WAITS |= {"unique_consecutive", "masked_select"}
READS_BACK = {aten._local_scalar_dense.default, aten.nonzero.default, aten.unique_consecutive.default}


class Launches(TorchDispatchMode):
    """Counts operators that compute or copy (kernels), views, and reads of numbers (waits)."""

    def __init__(self):
        super().__init__()
        self.kernels = self.views = self.waits = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in READS_BACK:
            self.waits += 1
        elif not func._schema.is_mutable and _shares(out, (args, kwargs)):
            self.views += 1
        elif any(isinstance(x, Tensor) for x in tree_leaves(out)):
            self.kernels += 1
        return out


def _shares(out, given):
    """Return whether a result is a view of an argument."""
    made, known = ([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in (out, given))
    memory = {x.untyped_storage().data_ptr() for x in known}
    return any(x.untyped_storage().data_ptr() in memory for x in made)


class Waits(TorchFunctionMode):
    """Counts calls that read a tensor back, or copy pageable memory to a device: what a GPU is waited for."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        uploads = name in ("tensor", "as_tensor") and "device" in (kwargs or {})
        indexed = name in ("__getitem__", "__setitem__") and _reads_back(args[1])
        if name in WAITS or uploads or indexed:
            self.calls.append(name)
        return func(*args, **(kwargs or {}))


def _reads_back(index):
    """Return whether an index is uploaded, or its size is read back: one of lists or flags."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(x, list) or (isinstance(x, Tensor) and x.dtype == torch.bool) for x in parts)


def as_traced(graph, *_, **__):
    """Compile a graph to what was traced, operator by operator."""
    weights = sum(n.op == "placeholder" and n.name.startswith("w") for n in graph.nodes)
    return runnable(copied(graph), [Recipe((i,)) for i in range(weights)])


def on_a_device(graph, _device, _weights=None, _inductor=False, **kwargs):
    """Compile a graph as for a device."""
    return compile_graph(graph, torch.device("meta"), **kwargs)


def of_a_layer(folder, compile, tokens=16, layer=1):
    """Return what slice `layer` launches, and the one matrix of q, k and v that is sent."""
    from hpcdecode.exchange.base import joined

    kept, bound_slice.compile_graph = bound_slice.compile_graph, compile
    try:
        model = load_split(folder, dtype="bfloat16")
    finally:
        bound_slice.compile_graph = kept
    context = (torch.randint(0, 100, (tokens,)), torch.arange(tokens), torch.arange(tokens))
    o = None
    for i in range(layer + 1):
        with Launches() as launches:
            rows, context = model.slice(i, o, context)
            joined(*rows)
        o = torch.zeros(tokens, model.attends[i].out_columns, dtype=model.dtype)
    return launches


if __name__ == "__main__":
    for name in ("llama3", "qwen3", "gemma3", "mixtral"):
        made = build(name, Path(sys.argv[1]) / name)
        for how in (as_traced, on_a_device):
            found = of_a_layer(made, how)
            print(f"{name:8} {how.__name__:12} kernels {found.kernels} views {found.views} waits {found.waits}")
