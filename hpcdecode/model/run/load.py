"""Load a model directory: trace it, cut it into slices, and bind their weights."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from hpcdecode.attention.base import isa
from hpcdecode.attention.cuda import HOW_TO_BUILD, built
from hpcdecode.errors import UserError
from hpcdecode.model.frontend.absorb import absorb
from hpcdecode.model.frontend.cache import cached_trace
from hpcdecode.model.frontend.checkpoint import holds_weights
from hpcdecode.model.frontend.choose import has_entries, has_indexers, join_indexers, join_scores, leave_out_indexers
from hpcdecode.model.frontend.config import ModelFacts, config_file, stated_config, stated_dtype
from hpcdecode.model.frontend.gguf.folder import model_folder
from hpcdecode.model.frontend.mapped import MappedFile
from hpcdecode.model.frontend.mtp import require_mtp
from hpcdecode.model.frontend.quantization.stated import read_scheme
from hpcdecode.model.frontend.shard import member_trace
from hpcdecode.model.frontend.split import split
from hpcdecode.model.frontend.stated import layers_of
from hpcdecode.model.lower import packed_weights, quantize
from hpcdecode.model.lower.few_bits import BY_INT8, FORMS, Quantised
from hpcdecode.model.lower.packed_weights import PRIVATE
from hpcdecode.model.run.checkpoint_weights import bound_weights, open_plain
from hpcdecode.model.run.cuda_graphs import GraphRecorder
from hpcdecode.model.run.split_model import AUTO, SplitModel
from hpcdecode.model.run.stages import stages_of
from hpcdecode.model.run.values import takes_form
from hpcdecode.requests.adapters import adapters_problem
from hpcdecode.system.shared_memory import WeightMemory
from hpcdecode.system.torch_functions import settle_functions

logger = logging.getLogger(__name__)
CHOOSING_NEEDS = "--partition request, no --route rotational, and no --schedule fluid"
WHERE = " with --partition head, --route rotational or --schedule fluid"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelPart(NamedTuple):
    """What a member of a group has of a model.

    Attributes:
        tp: Number of parts of each weight.
        tp_rank: Its part, from 0.
        pp: Number of stages, runs of layers.
        pp_rank: Its stage, from 0.
        ep: Whether experts are dealt out whole, instead of columns of every expert.
    """

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    ep: bool = False


WHOLE = ModelPart()


def parse_dtype(dtype: str | torch.dtype, path: str | Path) -> torch.dtype:
    """Return the torch dtype that `dtype` names.

    Args:
        dtype: float32, bfloat16 or float16, or "auto" for that of the checkpoint.
        path: Directory of the checkpoint.

    Raises:
        UserError: If the name is another.
    """
    if dtype == "auto":
        dtype = stated_dtype(path) or torch.float32
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise UserError(f"dtype {dtype} is not known: give one of {', '.join(DTYPES)}, auto")
    return found


def load_split(
    path: str | Path,
    *,
    dtype: str | torch.dtype,
    device: str | torch.device = "cpu",
    weights: bool = True,
    quantised: str | None = None,
    inductor: bool = False,
    announce: bool = False,
    lora: str | None = None,
    adapters: Mapping[str, str] | None = None,
    memory: WeightMemory = PRIVATE,
    tables: WeightMemory = PRIVATE,
    part: ModelPart = WHOLE,
    latents: bool = True,
    indexers: bool = True,
    graphs: bool = True,
    int8_activations: bool = False,
    mtp: bool = False,
    hidden: bool = False,
    like: SplitModel | None = None,
) -> SplitModel:
    """Trace, cut and bind a model.

    Args:
        path: Model directory in Hugging Face format, or a GGUF file.
        dtype: Type of activations, as `parse_dtype` takes it.
        device: Device that runs the slices.
        weights: Bind the weights. Without them only shapes can be asked for.
        quantised: What the weights of projections are quantised to: on CPUs int8 (see quantize.py), or one of
            few_bits.FORMS. None for nothing, AUTO for what they are in the checkpoint, if that holds the same numbers.
        inductor: Let torch's compiler compile the slices.
        announce: Log that a trace is being made, if that takes long, and what of the model cannot be used.
        lora: Directory of a PEFT adapter that is merged into the weights, or None.
        adapters: Directories of PEFT adapters that update the tokens that name them, by name.
        memory: Where to put packed weights.
        tables: Where to put tables that are several tensors of the checkpoint.
        part: What to load of it.
        latents: Let attention run over latents where K and V are projections of smaller ones (see `absorb`).
        indexers: Let indexers choose the tokens that longer sequences attend to; else such sequences are not run.
        graphs: Record slices as CUDA graphs, on a CUDA device.
        int8_activations: Round activations to int8, by a scale for 32 inputs, for GEMMs by weights in few bits but FP8.
        mtp: Load the model's layer for multi-token prediction, which takes hidden states, in place of the model.
        hidden: Let the last slice return the last hidden states, too.
        like: A model that was loaded of the same checkpoint to the same device: embeddings and LM head are taken from
            it where they would be made alike.

    Raises:
        UserError: If anything is missing, broken or not supported. It says what was expected and what to change.
    """
    settle_functions()
    device, folder, dtype = torch.device(device), model_folder(path), parse_dtype(dtype, path)
    if quantised not in (None, AUTO):
        require_quantised(quantised, device, dtype)
    if int8_activations:
        require_int8_activations(device, dtype)
    if adapters and (problem := adapters_problem(adapters)):
        raise UserError(f"--lora NAME=DIR: {problem}")
    config_file(folder)
    layers, scheme = layers_of(stated_config(folder)), read_scheme(folder)
    opens = weights and holds_weights(folder)  # if there are none, what the model lacks is said first
    exact = dtype if lora is None else torch.float32  # an adapter is added before weights are rounded
    tensors = open_plain(folder, layers, scheme, exact) if opens else {}
    if mtp and weights:
        require_mtp(tensors, layers)
    traced = cached_trace(folder, dtype, announce, mtp)
    could = has_indexers(traced)
    if has_entries(traced) and not (indexers and latents):
        raise UserError(
            f"model type {traced.facts.model_type!r}: attention over compressed entries needs {CHOOSING_NEEDS}"
        )
    traced = traced if indexers else leave_out_indexers(traced)
    own = member_trace(traced, part.tp, part.tp_rank, ep=part.ep)
    if latents:
        absorb(own)  # after the deal: heads are dealt out as they are in the model
    own = join_scores(join_indexers(own))
    tensors = tensors or (open_plain(folder, layers, scheme, exact) if weights else {})
    bound = None
    if weights:
        bound = bound_weights(folder, tensors, traced, own, device, scheme, lora, adapters, tables, mtp)
    parts = split(own, device, hidden)
    if announce:
        _tell_context(own.facts, could)
    if bound is None:
        return SplitModel(parts, device, None)
    own_layers = stages_of(parts, part.pp)[part.pp_rank]
    forget = partial(_forget_pages, {stored.mapped for stored in tensors.values()})
    recorder = GraphRecorder(device) if graphs and device.type == "cuda" else None
    packed = None if quantised is None else Quantised(None if quantised == AUTO else quantised, (), int8_activations)
    model = SplitModel(parts, device, bound, forget, packed, inductor, memory, own_layers, recorder, like)
    if int8_activations and announce and not model.rounds_activations and quantised != "int8":
        logger.warning(
            "hpcdecode: warning: --activations int8: no weights in few bits here (but FP8), so it does nothing"
        )
    return model


def _forget_pages(files: Iterable[MappedFile]) -> None:
    for file in files:
        file.forget_pages()


def _tell_context(facts: ModelFacts, could: bool) -> None:
    """Log a warning if sequences may not become as long as the model allows.

    Args:
        facts: About the model.
        could: Whether they might, with other ranks.
    """
    most, own = facts.max_positions, facts.own_positions
    if most is not None and own is not None and most < own:
        logger.warning(
            f"hpcdecode: warning: {facts.model_type}: sequences of at most {most:,} tokens, prompts included, in place "
            f"of {own:,}: in longer ones it attends to some tokens only, which is not supported{WHERE if could else ''}"
        )


def require_quantised(weights: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if the device has no GEMMs of such weights and activations of `dtype`."""
    name = str(dtype).removeprefix("torch.")
    if device.type == "cpu" and weights in FORMS:
        if not takes_form(weights, dtype, device):
            raise UserError(
                f"--weights {weights}: expected a CPU with AVX2 or AVX-512, and float32 or bfloat16, "
                f"got {isa()} and {name}; leave it out"
            )
    elif device.type == "cpu":
        if not quantize.exact():
            raise UserError(
                "--weights int8: expected a CPU with AVX2 or int8 products (VNNI), this one has neither; leave it out"
            )
    elif weights not in FORMS:
        raise UserError(
            f"--weights {weights}: expected S-ranks on CPUs, got {device.type}; add --device cpu, or leave it out"
        )
    elif not built():
        raise UserError(
            f"--weights {weights}: expected an hpcdecode that was built with CUDA, got one without; {HOW_TO_BUILD}, "
            "or leave it out"
        )
    elif not takes_form(weights, dtype, device):
        raise UserError(f"--weights {weights}: expected float32 or bfloat16, got {name}; leave it out")


def require_int8_activations(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UserError if the device has no GEMMs that round activations of `dtype`."""
    if device.type != "cpu" or not packed_weights.packs(dtype, BY_INT8["int4"]):
        raise UserError(
            "--activations int8: expected S-ranks on CPUs with AVX2 or AVX-512, and float32 or bfloat16, got "
            f"{isa() if device.type == 'cpu' else device.type} and {str(dtype).removeprefix('torch.')}; leave it out"
        )
