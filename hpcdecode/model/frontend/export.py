"""Export a model of transformers: its operators over the tokens of any sequences, side by side, without its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, fx

from hpcdecode.model.frontend.architectures import decoder_of, text_of
from hpcdecode.model.frontend.expand import expand
from hpcdecode.model.frontend.functional import functional
from hpcdecode.model.frontend.indexers import trace_positions
from hpcdecode.model.frontend.kinds import LayerKinds
from hpcdecode.model.frontend.quiet import no_stacks
from hpcdecode.model.frontend.rewritten import rewritten
from hpcdecode.model.frontend.skeleton import real_buffers, skeleton

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from transformers import PreTrainedConfig, PreTrainedModel

EXAMPLE_TOKENS, EXAMPLE_KEPT = 8, 3  # the graph holds for any number


class Exported(NamedTuple):
    """An exported model.

    Attributes:
        program: Result of torch.export.
        buffers: Values of the buffers that checkpoints leave out, by name in the transformers model.
    """

    program: ExportedProgram
    buffers: dict[str, Tensor]


def export_fast(config: PreTrainedConfig, dtype: torch.dtype) -> Exported:
    """Export one layer of each kind if that is known to give the same graph, else all."""
    try:
        return export_kinds(config, dtype)
    except Exception:  # whatever it is, tracing all layers is right or says what is wrong
        return export_whole(config, dtype)


def export_kinds(config: PreTrainedConfig, dtype: torch.dtype) -> Exported:
    """Export one layer of each kind, and put copies of it where the others are.

    Raises LayersDiffer if layers are not known to be alike, and whatever the exporter raises.
    """
    model = skeleton(config, dtype)
    buffers = real_buffers(model)
    kinds = LayerKinds(model, decoder_of(model), text_of(config).num_hidden_layers)
    with rewritten(model, dtype), kinds.standing_in():
        program = export(Flat(model))
    names = weight_names(program)
    common = {node for node, name in names.items() if name in buffers and not name.startswith(f"{kinds.name}.")}
    expand(program.graph, {node: name for node, name in names.items() if node not in common}, kinds.name)
    return Exported(program, buffers)


def export_whole(config: PreTrainedConfig, dtype: torch.dtype) -> Exported:
    """Export every layer. Raise whatever the exporter raises."""
    model = skeleton(config, dtype)
    return exported(model, Flat(model), dtype)


def exported(
    model: PreTrainedModel, flat: torch.nn.Module, dtype: torch.dtype, *rows: tuple[int, torch.dtype]
) -> Exported:
    """Export a model as it is; arguments: as of `export`, and the dtype of its activations."""
    buffers = real_buffers(model)
    with rewritten(model, dtype):
        return Exported(export(flat, *rows), buffers)


def weight_names(program: ExportedProgram) -> dict[fx.Node, str]:
    """Return the name of the model's parameter or buffer that a placeholder of `program` holds."""
    nodes = {n.name: n for n in program.graph.nodes}
    specs = program.graph_signature.input_specs
    return {nodes[s.arg.name]: s.target.removeprefix("model.") for s in specs if s.target is not None}


class Flat(torch.nn.Module):
    """A model over the tokens of all sequences side by side, which computes the logits of some of them only."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        """Return the logits [L, vocab].

        Args:
            ids: Token ids, int64 [T].
            positions: Positions of the tokens, int64 [T].
            keep: Indices of the tokens whose logits are computed, int64 [L]. Stored traces have this name.
        """
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        check: Callable[[bool], None] = torch._check
        check(ids.shape[0] == positions.shape[0])  # one symbol from the first layer on, so that layers are alike
        trace_positions(positions)
        out = self.model(input_ids=ids[None], position_ids=positions[None], logits_to_keep=keep, use_cache=False)
        logits: Tensor = out.logits[0]
        kept_all = statically_known_true(logits.shape[0] == ids.shape[0])  # some models compute those of all tokens
        return logits[keep] if kept_all else logits


def export(flat: torch.nn.Module, *rows: tuple[int, torch.dtype]) -> ExportedProgram:
    """Export a model over fake tensors, without in-place operators; the numbers T and L stay symbols.

    Args:
        flat: The model, as `Flat` takes what a step brings.
        rows: Size and dtype of the rows of further inputs, [T, size].
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tokens, kept = torch.export.Dim("T", max=1 << 24), torch.export.Dim("L", max=1 << 24)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        flat.to_empty(device="cpu")
        args = [torch.zeros(n, dtype=torch.int64) for n in (EXAMPLE_TOKENS, EXAMPLE_TOKENS, EXAMPLE_KEPT)]
        args += [torch.zeros(EXAMPLE_TOKENS, size, dtype=dtype) for size, dtype in rows]
    with torch.no_grad(), no_stacks():
        shapes = ({0: tokens}, {0: tokens}, {0: kept}, *({0: tokens} for _ in rows))
        return functional(torch.export.export(flat, tuple(args), dynamic_shapes=shapes, strict=False))
