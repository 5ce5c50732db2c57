"""Trace a decoder, without its weights, to one flat graph over the tokens of any sequences.

Attention is an opaque operator in the graph, so that the graph can be cut there (Lamina, section 5.3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, fx

from hpcdecode.errors import UserError, first_line
from hpcdecode.model.frontend import ops
from hpcdecode.model.frontend.architectures import text_of
from hpcdecode.model.frontend.clean import clean
from hpcdecode.model.frontend.compressors import COMPRESSED
from hpcdecode.model.frontend.config import ATTENTION_KINDS, ModelFacts, layer_types, unsupported
from hpcdecode.model.frontend.convolutions import join_convolutions
from hpcdecode.model.frontend.export import export_fast, export_whole
from hpcdecode.model.frontend.llama4 import CHUNKED
from hpcdecode.model.frontend.membership import Membership, WeightCut
from hpcdecode.model.frontend.meta import KEPT, TOKENS, annotate
from hpcdecode.model.frontend.mixers import mixers
from hpcdecode.model.frontend.mtp import export_mtp, mtp_config
from hpcdecode.model.frontend.nodes import results, traced_tensor
from hpcdecode.model.frontend.operators import ATTEND
from hpcdecode.model.frontend.quiet import quiet
from hpcdecode.model.frontend.softplus import join_softplus
from hpcdecode.model.frontend.token_dims import separate_tokens

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from transformers import PreTrainedConfig

BYPASS = "its attention bypasses transformers' attention interface"


@dataclass
class Trace:
    """A traced model.

    Attributes:
        graph: Graph that takes weights, constants, ids, positions and logits_indices, and returns the logits.
        ids: Placeholder of the token ids, int64 [T].
        positions: Placeholder of the tokens' positions, int64 [T].
        logits_indices: Placeholder of the indices of the tokens whose logits are computed, int64 [L].
        weights: Name in the transformers model, by placeholder.
        constants: Values of the buffers that checkpoints leave out, by placeholder.
        attends: Calls of attention, one per layer, in order.
        logits: Node that computes the logits, [L, vocab].
        dtype: Dtype of the parameters.
        facts: Facts about the model that are needed later.
        cuts: What part of its weight a placeholder takes. Those that take all of it are left out.
        membership: What a member of a group has of the model, or None for the trace of a whole model.
        adapters: Placeholder of the tokens' adapters, int64 [T], -1 for none; None if there are no adapters.
        updates: What reads the weights of all adapters, by placeholder (see `adapters.py`).
        hidden: Placeholder of hidden states, [T, hidden], of a trace that goes on from those of another model.
    """

    graph: fx.Graph
    ids: fx.Node
    positions: fx.Node
    logits_indices: fx.Node
    weights: dict[fx.Node, str]
    constants: dict[fx.Node, Tensor]
    attends: list[fx.Node]
    logits: fx.Node
    dtype: torch.dtype
    facts: ModelFacts
    cuts: dict[fx.Node, WeightCut] = field(default_factory=dict)
    membership: Membership | None = None
    adapters: fx.Node | None = None
    updates: dict[fx.Node, Callable[[], Tensor]] = field(default_factory=dict)
    hidden: fx.Node | None = None

    @property
    def step_inputs(self) -> tuple[fx.Node, ...]:
        """Return the placeholders of what a step brings: the context of the first slice."""
        given = (self.ids, self.positions, self.logits_indices, self.adapters, self.hidden)
        return tuple(node for node in given if node is not None)


def trace(config: PreTrainedConfig, dtype: torch.dtype, whole: bool = False, mtp: bool = False) -> Trace:
    """Trace the causal language model of `config`.

    Args:
        config: Config of the model.
        dtype: Dtype of the parameters.
        whole: Whether to trace every layer, not one of each kind.
        mtp: Whether to trace its layer for multi-token prediction, in place of the others.

    Raises:
        UserError: If the model cannot be traced, or if its attention does not go through attend.
    """
    with quiet():
        try:
            export = export_mtp if mtp else export_whole if whole else export_fast
            exported = export(config, dtype)
            return read_program(exported.program, exported.buffers, mtp_config(config) if mtp else config, dtype)
        except UserError as e:
            raise unsupported(config, str(e)) from e
        except KeyError as e:
            raise unsupported(config, BYPASS if e.args == (ops.NAME,) else f"tracing it ends in {first_line(e)}") from e
        except ModuleNotFoundError as e:
            package = (e.name or str(e)).partition(".")[0]
            raise UserError(
                f"model type {config.model_type!r}: transformers makes it with the package {package}, which is not "
                f"installed: pip install {package}"
            ) from e
        except Exception as e:
            raise unsupported(config, f"torch.export cannot trace it ({first_line(e)})") from e


def read_program(
    program: ExportedProgram, buffers: dict[str, Tensor], config: PreTrainedConfig, dtype: torch.dtype
) -> Trace:
    """Return the trace of an exported program: its placeholders sorted, its graph simplified, its attention checked.

    Args:
        program: Program, changed in place.
        buffers: Values of the buffers that checkpoints leave out, by name.
        config: Config of the model.
        dtype: Dtype of its parameters.

    Raises:
        UserError: If the model changes buffers as it runs, or if its attention does not go through attend.
    """
    if mutated := program.graph_signature.buffers_to_mutate:
        names = ", ".join(mutated.values())
        raise UserError(f"it changes {names} as it runs, so that rows would depend on each other")
    (ids, positions, logits_indices, *more), weights, constants = sort_inputs(program, buffers)
    clean(program.graph)
    tokens, kept = (str(traced_tensor(n).shape[0]) for n in (ids, logits_indices))
    annotate(program.graph, {tokens: TOKENS, kept: KEPT})
    join_softplus(program.graph)
    separate_tokens(program.graph)
    join_convolutions(program.graph)
    attends = mixers(list(program.graph.nodes))
    check_attends(attends, config)
    (logits,) = results(program.graph)
    return Trace(
        graph=program.graph,
        ids=ids,
        positions=positions,
        logits_indices=logits_indices,
        weights=weights,
        constants=constants,
        attends=attends,
        logits=logits,
        dtype=dtype,
        facts=ModelFacts.of(config),
        hidden=more[0] if more else None,
    )


class TraceInputs(NamedTuple):
    """Placeholders of an exported program: the inputs of a step, the names of weights, the values of constants."""

    step: list[fx.Node]
    weights: dict[fx.Node, str]
    constants: dict[fx.Node, Tensor]


def sort_inputs(program: ExportedProgram, buffers: dict[str, Tensor]) -> TraceInputs:
    """Return the placeholders of `program` by kind; buffers: values of those that checkpoints leave out."""
    from torch.export.graph_signature import InputKind

    nodes = {n.name: n for n in program.graph.nodes}
    inputs = TraceInputs([], {}, {})
    for spec in program.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        name = (spec.target or "").removeprefix("model.")
        if spec.kind == InputKind.USER_INPUT:
            inputs.step.append(node)
        elif name in buffers:
            inputs.constants[node] = buffers[name]
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            inputs.constants[node] = program.constants[spec.target]
        else:
            inputs.weights[node] = name
    return inputs


def check_attends(mixers_: list[fx.Node], config: PreTrainedConfig) -> None:
    """Raise UserError unless every layer sends its attention, and its sliding window, through attend.

    Where layers keep recurrent states, the check of what mixes tokens shows that no attention was left out.

    Args:
        mixers_: Attentions and recurrences, in order.
        config: Config of the model.
    """
    text = text_of(config)
    layers: int = text.num_hidden_layers
    attends = [n for n in mixers_ if n.target is ATTEND]
    if len(attends) == len(mixers_) != layers:
        unlike = f"it has {len(attends)} attentions in {layers} layers"
        raise UserError(f"{BYPASS} in {layers - len(attends)} of {layers} layers" if len(attends) < layers else unlike)
    calls = [ops.AttendArguments.of(attend) for attend in attends]
    windows = [call.window for call in calls]
    kinds = [kind for kind in layer_types(text, layers) if kind in ATTENTION_KINDS]
    if len(kinds) != len(windows) and any(windows):
        raise UserError(f"it states {len(kinds)} layers with attention, and has {len(windows)}")
    for i, (kind, call) in enumerate(zip(kinds, calls, strict=False)):
        expected = CHUNKED if call.chunked else "sliding_attention" if call.window is not None else None
        if call.compress_rate:
            expected = kind if kind in COMPRESSED else None
        if kind != expected and {kind, expected} & {CHUNKED, "sliding_attention"}:
            raise UserError(f"attention {i} is {kind!r} but passes sliding_window={call.window}")
