"""Trace a decoder to one flat graph over the tokens of any sequences, without its weights.

Lamina 5.3: attention is an opaque operator in the graph, so that the graph can be cut there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hpcdecode.errors import UserError, first_line
from hpcdecode.model.frontend import ops
from hpcdecode.model.frontend.clean import clean
from hpcdecode.model.frontend.config import ModelFacts, quiet, unsupported
from hpcdecode.model.frontend.expand import expand
from hpcdecode.model.frontend.kinds import Kinds
from hpcdecode.model.frontend.meta import KEPT, TOKENS, annotate

EXAMPLE_TOKENS, EXAMPLE_KEPT = 8, 3  # the graph holds for any number
Program = tuple[torch.export.ExportedProgram, dict[str, Tensor]]  # and the values of buffers
BYPASS = "its attention bypasses transformers' attention interface"


@dataclass
class Trace:
    graph: (
        fx.Graph
    )  # placeholders: weights, constants, then ids [T], positions [T], keep [L]; returns logits [L, vocab]
    ids: fx.Node
    positions: fx.Node
    logits_indices: fx.Node
    weights: dict[fx.Node, str]  # name in the transformers model
    constants: dict[fx.Node, Tensor]  # buffers that no checkpoint holds, with their values
    attends: list[fx.Node]
    logits: fx.Node
    dtype: torch.dtype
    facts: ModelFacts


def trace(config, dtype: torch.dtype, whole: bool = False) -> Trace:
    """Trace the causal language model of `config` in `dtype`.

    whole: trace every layer, not one of each kind.

    Raises UserError if transformers' code for it cannot be traced or does not send its attention through attend.
    """
    with quiet():
        try:
            program, buffers = export_whole(config, dtype) if whole else export_fast(config, dtype)
        except UserError as e:
            raise unsupported(config, str(e)) from e
        except KeyError as e:
            raise unsupported(config, BYPASS if e.args == (ops.NAME,) else f"tracing it ends in {first_line(e)}") from e
        except Exception as e:
            raise unsupported(config, f"torch.export cannot trace it ({first_line(e)})") from e
    return read_program(program, buffers, config, dtype)


def export_fast(config, dtype: torch.dtype) -> Program:
    """Export one layer of each kind if that is known to give the same graph, else all."""
    try:
        return export_kinds(config, dtype)
    except Exception:  # whatever it is, tracing all layers is right or says what is wrong
        return export_whole(config, dtype)


def export_kinds(config, dtype: torch.dtype) -> Program:
    """Export one layer of each kind, and put copies of it where the others are.

    Raises Unlike if layers are not known to be alike, and whatever the exporter raises.
    """
    model = skeleton(config, dtype)
    buffers = real_buffers(model)
    kinds = Kinds(model, config.num_hidden_layers)
    with kinds.standing_in():
        program = export(model)
    expand(program.graph, weight_names(program), kinds.name)
    return program, buffers


def export_whole(config, dtype: torch.dtype) -> Program:
    model = skeleton(config, dtype)
    buffers = real_buffers(model)
    return export(model), buffers


def weight_names(program: torch.export.ExportedProgram) -> dict[fx.Node, str]:
    """By placeholder the parameter or buffer of the model that it holds."""
    nodes = {n.name: n for n in program.graph.nodes}
    specs = program.graph_signature.input_specs
    return {nodes[s.arg.name]: s.target.removeprefix("model.") for s in specs if s.target is not None}


def skeleton(config, dtype: torch.dtype) -> torch.nn.Module:
    """The transformers model on the meta device: parameters in `dtype`, save those the model keeps in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import build_glob_alternation

    ops.register()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ops.NAME).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation(ops.NAME)
    plan = model._get_dtype_plan(dtype)
    if plan:
        pattern, key_of_group, _ = build_glob_alternation(list(plan))
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if match := pattern.search(name):
                tensor.data = tensor.data.to(plan[key_of_group[match.lastgroup]])
    return model


def real_buffers(model) -> dict[str, Tensor]:
    """Values of the buffers that checkpoints leave out (rotary frequencies, say), set as from_pretrained sets them."""
    kept = dict(model.named_non_persistent_buffers())
    for name, buffer in kept.items():
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, torch.empty_like(buffer, device="cpu"))
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True
    with torch.no_grad():
        model.initialize_weights()
    return {name: model.get_buffer(name) for name in kept}


class Flat(torch.nn.Module):
    """Tokens of all sequences in one row; logits of the kept tokens only."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, positions, keep):
        torch._check(ids.shape[0] == positions.shape[0])  # one symbol from the first layer on, so that layers are alike
        out = self.model(input_ids=ids[None], position_ids=positions[None], logits_to_keep=keep, use_cache=False)
        return out.logits[0]


def export(model) -> torch.export.ExportedProgram:
    """Export and functionalise `model` under fake tensors; the number of tokens and of kept tokens stay symbols."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    tokens, kept = torch.export.Dim("T", max=1 << 24), torch.export.Dim("L", max=1 << 24)
    with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        args = tuple(torch.zeros(n, dtype=torch.int64) for n in (EXAMPLE_TOKENS, EXAMPLE_TOKENS, EXAMPLE_KEPT))
    with torch.no_grad():
        shapes = ({0: tokens}, {0: tokens}, {0: kept})
        program = torch.export.export(Flat(model), args, dynamic_shapes=shapes, strict=False)
        return program.run_decompositions({})


def read_program(program, buffers: dict[str, Tensor], config, dtype: torch.dtype) -> Trace:
    """Sort the placeholders of an exported program by kind, clean its graph and check its attends."""
    from torch.export.graph_signature import InputKind

    signature = program.graph_signature
    if signature.buffers_to_mutate:
        names = ", ".join(signature.buffers_to_mutate.values())
        raise unsupported(config, f"it changes {names} as it runs, so that rows would depend on each other")
    nodes = {n.name: n for n in program.graph.nodes}
    inputs, weights, constants = [], {}, {}
    for spec in signature.input_specs:
        node = nodes[spec.arg.name]
        name = (spec.target or "").removeprefix("model.")
        if spec.kind == InputKind.USER_INPUT:
            inputs.append(node)
        elif name in buffers:
            constants[node] = buffers[name]
        elif spec.kind == InputKind.CONSTANT_TENSOR:
            constants[node] = program.constants[spec.target]
        else:
            weights[node] = name
    clean(program.graph)
    tokens, kept = (str(inputs[i].meta["val"].shape[0]) for i in (0, 2))
    annotate(program.graph, {tokens: TOKENS, kept: KEPT})
    attends = [n for n in program.graph.nodes if n.target is torch.ops.hpcdecode.attend.default]
    check_attends(attends, config)
    (logits,) = program.graph.output_node().args[0]
    return Trace(program.graph, *inputs, weights, constants, attends, logits, dtype, ModelFacts.of(config))


def check_attends(attends: list[fx.Node], config) -> None:
    """Raise UserError unless every layer sends its attention, and its sliding window, through attend."""
    if len(attends) != config.num_hidden_layers:
        raise unsupported(
            config, f"{BYPASS} in {config.num_hidden_layers - len(attends)} of {config.num_hidden_layers} layers"
        )
    windows = [attend.args[6] for attend in attends]
    layers = getattr(config, "layer_types", None)
    if layers is None and getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        layers = ["sliding_attention"] * len(windows)
    for i, (layer, window) in enumerate(zip(layers or (), windows, strict=False)):
        if (layer == "sliding_attention") != (window is not None):
            raise unsupported(config, f"layer {i} is {layer!r} but passes sliding_window={window} to its attention")
