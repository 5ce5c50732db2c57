"""A model directory, split: its token-wise part as n + 1 slices, to be run around attention done elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, fx

from hpcdecode.attention.base import LayerShape
from hpcdecode.errors import UserError
from hpcdecode.model.frontend.cache import cached_sources, cached_trace
from hpcdecode.model.frontend.checkpoint import (
    Stack,
    StoredTensor,
    forget_pages,
    holds_weights,
    open_checkpoint,
    read_weights,
)
from hpcdecode.model.frontend.config import config_file, stated_config, stated_dtype
from hpcdecode.model.frontend.describe import describe
from hpcdecode.model.frontend.meta import meta
from hpcdecode.model.frontend.plausible import check_values
from hpcdecode.model.frontend.quantised import refuse_quantised
from hpcdecode.model.frontend.rows import empty_rows
from hpcdecode.model.frontend.split import Split, split
from hpcdecode.model.frontend.stated import layers_of
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.lower import quantize
from hpcdecode.model.lower.compile import Compiled, compile_graph, runnable
from hpcdecode.model.run.lm_head import Head, head_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class SplitModel:
    """The token-wise part of a decoder (S-part). Tokens of any sequences may share a call; none sees another.

    With n layers there are n + 1 slices: `slice(0)` .. `slice(n - 1)` each end at an attention, `logits` is the last.
    A context is a tuple of tensors to hand on unchanged to the next slice, and to drop after that.
    """

    def __init__(
        self,
        parts: Split,
        device: torch.device,
        weights: dict[str, Tensor | Stack] | None,
        slice_bound: Callable[[], None] = lambda: None,
        int8: bool = False,
        inductor: bool = False,
    ):
        """`slice_bound` is called when the weights of one more slice are in their final form, int8 or as they were."""
        self.parts = parts
        self.device = device
        self.facts = parts.trace.facts
        self.dtype: torch.dtype = parts.trace.dtype
        self.attends: tuple[LayerShape, ...] = layer_shapes(parts.trace)
        self.vocab_size: int = meta(parts.trace.logits).shape[-1]
        self.max_positions = self.facts.max_positions
        self._compiled: list[Compiled] = []  # of every slice
        self._weights: list[tuple] = []
        self._sinks: list[Tensor | None] = []
        self._head: tuple[Compiled, Head] | None = None  # of the last slice: what comes before it, and itself
        if weights is not None:
            self._bind(weights, slice_bound, int8, inductor)

    def _bind(
        self, weights: dict[str, Tensor | Stack], slice_bound: Callable[[], None], int8: bool, inductor: bool
    ) -> None:
        values = Values(self.parts.trace, weights, self.device)
        compiled = [compile_graph(group.graph, self.device, int8, inductor) for group in self.parts.groups]
        self._compiled = [compiled[s.group] for s in self.parts.slices]
        for part in self.parts.slices:
            self._weights.append(compiled[part.group].weights([values[n] for n in part.weights]))
            slice_bound()
        if self.device.type == "cpu" and (found := head_of(self._compiled[-1].graph, self._weights[-1])) is not None:
            self._head = runnable(found[0], []), found[1]
        sinks = [node.args[8] for node in self.parts.trace.attends]
        self._sinks = [None if n is None else values[n].to(torch.float32) for n in sinks]

    @torch.inference_mode()
    def slice(
        self, i: int, o: Tensor | None, ctx: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
        """Run slice `i` of 0 .. n - 1 over T tokens: up to the q, k and v of layer i.

        i == 0: `o` is None and `ctx` is (token ids int64 [T], positions int64 [T], kept token indices int64 [L]).
        i > 0: `o` is the attention output of layer i - 1, [T, q_heads * v_dim], and `ctx` what slice i - 1 returned.
        Returns q [T, q_heads * k_dim], k [T, kv_heads * k_dim], v [T, kv_heads * v_dim] in the model's dtype, rows
        possibly strided, and the next context. T >= 1, L >= 0. All are inference tensors: not to be changed in place.
        """
        part = self.parts.slices[i]
        q, k, v, *new = self._call(self._compiled[i], i, o, ctx)
        return q, k, v, tuple([ctx[j] if j >= 0 else new[~j] for j in part.give])

    @torch.inference_mode()
    def logits(self, o: Tensor, ctx: tuple[Tensor, ...]) -> Tensor:
        """Run the last slice: logits [L, vocab] of the kept tokens, from the last layer's attention output.

        Only the kept tokens pass the slice.
        """
        o, ctx = self._kept(o, ctx)
        if len(o) == 0:
            return o.new_empty(0, self.vocab_size)
        return self._call(self._compiled[-1], -1, o, ctx)[0]

    @torch.inference_mode()
    def argmax(self, o: Tensor, ctx: tuple[Tensor, ...]) -> Tensor | None:
        """The first of the largest `logits` of each kept token, int64 [L], where it is found without most of them."""
        if self._head is None or self._head[1].rests():
            return None
        before, head = self._head
        o, ctx = self._kept(o, ctx)
        return head.argmax(self._call(before, -1, o, ctx)[0])

    def _kept(self, o: Tensor, ctx: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What the last slice takes, as if the kept tokens were all."""
        context = self.parts.slices[-2].context
        keep = ctx[context.index(self.parts.trace.logits_indices)]
        if len(keep) == len(o):
            return o, ctx
        rows = []
        for node, x in zip(context, ctx, strict=True):
            if node is self.parts.trace.logits_indices:
                rows.append(torch.arange(len(keep), device=keep.device))
            else:
                dim = meta(node).token_dim
                rows.append(x if dim is None else x.index_select(dim, keep))
        return o[keep], tuple(rows)

    def _call(self, compiled: Compiled, i: int, o: Tensor | None, ctx: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        given = [ctx[j] for j in self.parts.slices[i].take]
        return compiled.run(*given if o is None else (o, *given), *self._weights[i])

    def graph(self, i: int) -> fx.Graph:
        """What slice `i` runs: ([o,] context..., weights...) -> (q, k, v, context...)."""
        return self._compiled[i].graph

    def weights(self, i: int) -> tuple[Tensor | Stack, ...]:
        """Those of slice `i`, as its graph takes them."""
        return self._weights[i]

    def empty_output(self, i: int, tokens: int) -> Tensor:
        """Room for the attention output of layer `i`, [T, q_heads * v_dim], as the next slice reads it best."""
        columns = self.attends[i].out_columns
        if self.device.type != "cpu":
            return torch.empty(tokens, columns, dtype=self.dtype, device=self.device)
        return empty_rows(tokens, columns, self.dtype)

    def sinks(self, i: int) -> Tensor | None:
        """The attention sinks of layer `i`, float32 [q_heads], or None."""
        return self._sinks[i]

    def describe(self) -> dict:
        """Slices, groups of equal slices, tensors cut and bytes per token, as plain data; `render` makes it text."""
        return describe(self.parts, self.attends, self.dtype)


class Values:
    """Values of a trace's static nodes: weights, constants, and expressions of them, each computed once."""

    def __init__(self, trace: Trace, weights: dict[str, Tensor | Stack], device: torch.device):
        self.device = device
        self.known: dict[fx.Node, Tensor | Stack] = {node: c.to(device) for node, c in trace.constants.items()}
        self.known.update({node: weights[name] for node, name in trace.weights.items() if name in weights})

    def __getitem__(self, node: fx.Node) -> Tensor | Stack:
        if node not in self.known:
            args = fx.map_arg(node.args, self.__getitem__)
            kwargs = {
                k: self.device if k == "device" else v
                for k, v in fx.map_arg(dict(node.kwargs), self.__getitem__).items()
            }
            with torch.no_grad():
                self.known[node] = node.target(*args, **kwargs)
        return self.known[node]


def layer_shapes(trace: Trace) -> tuple[LayerShape, ...]:
    shapes = []
    for node in trace.attends:
        _, k, v, q_heads, kv_heads, scale, window, softcap, sinks = node.args
        k_dim, v_dim = (meta(x).shape[1] // kv_heads for x in (k, v))
        shapes.append(LayerShape(kv_heads, k_dim, v_dim, q_heads, scale, window, softcap, sinks is not None))
    return tuple(shapes)


def stackable(trace: Trace) -> set[str]:
    """Experts' weights that only `expert_linear` reads, so that they need not be one tensor."""
    linear = torch.ops.hpcdecode.expert_linear.default
    return {
        name
        for node, name in trace.weights.items()
        if node.users and all(u.target is linear and u.args[2] is node and u.args[4] is False for u in node.users)
    }


def parse_dtype(dtype: str | torch.dtype, path: str | Path) -> torch.dtype:
    """The torch dtype meant by `dtype`: a name, or "auto" for that of the checkpoint in `path`."""
    if dtype == "auto":
        dtype = stated_dtype(path) or torch.float32
    found = DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    if found not in DTYPES.values():
        raise UserError(f"dtype {dtype} is not known: give one of {', '.join(DTYPES)}, auto")
    return found


def load_split(
    path: str | Path,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device = "cpu",
    weights: bool = True,
    int8: bool = False,
    inductor: bool = False,
    announce: bool = False,
) -> SplitModel:
    """Trace, cut and bind the model directory `path`; without `weights` only shapes can be asked for.

    int8: projections multiply in int8, on a CPU with VNNI (see quantize.py). inductor: slices by torch's compiler.
    announce: say on standard error that a trace is being made, if that takes long.

    Raises UserError for whatever is missing, broken or not supported, saying what was expected and what to change.
    """
    device = torch.device(device)
    if int8 and device.type != "cpu":
        raise UserError(
            f"--weights int8: expected S-ranks on CPUs, got {device.type}; add --device cpu, or leave it out"
        )
    if int8 and not quantize.exact():
        raise UserError("--weights int8: expected a CPU with int8 products (VNNI), this one has none; leave it out")
    folder, dtype = Path(path), parse_dtype(dtype, path)
    config_file(folder)
    layers = layers_of(stated_config(folder))
    opens = weights and holds_weights(folder)  # if there are none, what the model lacks is said first
    tensors = open_checkpoint(folder, layers) if opens else {}
    traced = cached_trace(folder, dtype, announce)
    if not weights:
        return SplitModel(split(traced, device), device, None)
    tensors = tensors or open_checkpoint(folder, layers)
    files = {stored.file for stored in tensors.values()}
    bound = read_bound(folder, tensors, traced, device)
    del tensors
    return SplitModel(split(traced, device), device, bound, lambda: forget_pages(files), int8, inductor)


def read_bound(
    folder: Path, tensors: dict[str, StoredTensor], traced: Trace, device: torch.device
) -> dict[str, Tensor | Stack]:
    """Return the weights that the nodes of `traced` use, from the `tensors` of the checkpoint in `folder`.

    Raises UserError if the checkpoint is incomplete, quantised or damaged.
    """
    wanted = {name: meta(node) for node, name in traced.weights.items() if node.users}
    sources = cached_sources(folder, traced.dtype, list(tensors), set(wanted), stackable(traced))
    refuse_quantised(tensors, sources, wanted)
    weights = read_weights(folder, tensors, sources, wanted, device)
    check_values(folder, weights)
    return weights
