"""How tensors of a GGUF file differ from those of the checkpoint, by architecture.

Source: what llama.cpp's converter changes in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Order(NamedTuple):
    """An order of the rows or columns of a tensor.

    Attributes:
        sizes: Those behind the first are [a, b, c, d] in the file and [a, c, b, d] in the checkpoint. One may be -1.
        first: Number of those in front, which are in their places.
    """

    sizes: tuple[int, int, int, int]
    first: int = 0

    def fits(self, count: int) -> bool:
        """Return whether `count` rows or columns can be in this order."""
        known, behind = [size for size in self.sizes if size != -1], count - self.first
        return min(known) > 0 and 0 <= self.first < count and behind % math.prod(known) == 0

    def undo(self, rows: Tensor) -> Tensor:
        """Return rows [rows, any] in the order of the checkpoint."""
        import torch

        behind = rows[self.first :]
        swapped = behind.reshape(*self.sizes, *behind.shape[1:]).transpose(1, 2).reshape(behind.shape)
        return torch.cat([rows[: self.first], swapped]) if self.first else swapped


class Change(NamedTuple):
    """How a tensor of a GGUF file differs from that of the checkpoint. It is undone when the tensor is read.

    Attributes:
        rows: Order of its rows, or None for that of the checkpoint.
        columns: Order of its columns, likewise.
        added: Number that was added to all elements.
        logarithm: Whether it holds -exp(x) of elements x.
        transposed: Whether it was transposed.
        row: Whether it was one row, of which the values are left.
        middle: Whether it had a dimension of 1 between its two.
        flat: Whether it had one dimension.
    """

    rows: Order | None = None
    columns: Order | None = None
    added: float = 0.0
    logarithm: bool = False
    transposed: bool = False
    row: bool = False
    middle: bool = False
    flat: bool = False

    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the checkpoint's tensor, given that in the file."""
        if self.transposed:
            return stored[::-1]
        if self.flat:
            return (math.prod(stored),)
        if self.row:
            return (1, math.prod(stored))
        return (stored[0], 1, *stored[1:]) if self.middle else stored

    def numbers(self, stored: Tensor) -> Tensor:
        """Return the numbers of the checkpoint's tensor, given some of those in the file, which it changes."""
        if self.added:
            stored.sub_(self.added)
        return stored.neg_().log_() if self.logarithm else stored


SAME = Change()
Values = Mapping[str, Any]  # metadata without the architecture's prefix
Changes = Callable[[str, Values], Change]


def size(values: Values, name: str, tensor: str = "") -> int:
    """Return a size that the metadata states, or 0, which fits no tensor, if it states none.

    Args:
        values: The metadata.
        name: Its name.
        tensor: Name of a tensor of the layer whose size it is, if layers have sizes of their own.
    """
    found = values.get(name)
    if isinstance(found, list):
        layer = tensor.split(".")[1] if tensor.startswith("blk.") else ""
        found = found[int(layer)] if layer.isdigit() and int(layer) < len(found) else None
    return found if type(found) is int and found > 0 else 0


def unchanged(name: str, values: Values) -> Change:
    """Return the change of most architectures: none."""
    return SAME


def interleaved(name: str, values: Values) -> Change:
    """Return the change of Llama: rows of queries and keys are in the order of GGML's rotary embedding."""
    if ".attn_q." not in name and ".attn_k." not in name:
        return SAME
    of_keys = ".attn_k." in name and "attention.head_count_kv" in values
    heads = size(values, "attention.head_count_kv" if of_keys else "attention.head_count", name)
    return Change(rows=Order((heads, -1, 2, 1)))


def plus_one(name: str, values: Values) -> Change:
    """Return the change of Gemma: norms have 1 added."""
    return Change(added=1.0) if name.endswith("norm.weight") else SAME


def transposed(name: str, values: Values) -> Change:
    """Return the change of GPT-2: projections are stored by output."""
    modules = ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    return Change(transposed=True) if name.endswith(tuple(f".{m}.weight" for m in modules)) else SAME


def gate_as_row(name: str, values: Values) -> Change:
    """Return the change of Qwen2-MoE: the gate of the shared expert is a vector."""
    return Change(row=True) if name.endswith(".ffn_gate_inp_shexp.weight") else SAME


def correction_as_row(name: str, values: Values) -> Change:
    """Return the change of ERNIE 4.5 with experts: what corrects their scores may be a vector."""
    return Change(row=True) if name.endswith(".exp_probs_b.bias") else SAME


def convolution(name: str, values: Values) -> Change:
    """Return the change of LFM2: the kernel of a convolution by channel has no dimension of input channels."""
    return Change(middle=True) if name.endswith(".shortconv.conv.weight") else SAME


def recurrence(name: str, values: Values) -> Change:
    """Return the change of recurrences: convolutions, decays, and parameters with a dimension too many."""
    if name.endswith((".ssm_conv1d.weight", ".ssm_a")):
        return Change(middle=name.endswith("weight"), logarithm=name.endswith("a"), flat=name.endswith("a"))
    return Change(flat=True) if name.endswith((".ssm_d", ".ssm_norm.weight")) else SAME


def llama_hybrid(name: str, values: Values) -> Change:
    """Return the change of Granite 4 and Nemotron-H: that of recurrences, and that of Llama."""
    return recurrence(name, values) if ".ssm_" in name else interleaved(name, values)


def gated_delta(name: str, values: Values) -> Change:
    """Return the change of Qwen3-Next: that of recurrences, and norms but those of heads of V have 1 added."""
    if ".ssm_" in name:
        return recurrence(name, values)
    return gate_as_row(name, values) if "ffn_gate_inp_shexp" in name else plus_one(name, values)


def sorted_values(name: str, values: Values) -> Change:
    """Return the change of Qwen3.5: that of Qwen3-Next, and heads of V are sorted by their place under heads of K."""
    keys, heads = size(values, "ssm.group_count"), size(values, "ssm.time_step_rank")
    change, whole = gated_delta(name, values), (1, heads // max(keys, 1), keys, -1)
    if name.endswith((".attn_qkv.weight", ".ssm_conv1d.weight")):
        return change._replace(rows=Order(whole, first=2 * keys * size(values, "ssm.state_size")))
    if name.endswith(".ssm_out.weight"):
        return change._replace(columns=Order(whole))
    by_head = (".attn_gate.weight", ".ssm_alpha.weight", ".ssm_beta.weight", ".ssm_a", ".ssm_dt.bias")
    return change._replace(rows=Order(whole)) if name.endswith(by_head) else change
