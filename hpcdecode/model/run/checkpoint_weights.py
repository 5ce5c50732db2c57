"""The weights of a model directory, or of one of its parts, as the nodes of a trace take them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from hpcdecode.model.frontend.add_adapters import add_adapters
from hpcdecode.model.frontend.cache import cached_sources
from hpcdecode.model.frontend.checkpoint import open_checkpoint
from hpcdecode.model.frontend.gguf.checkpoint import open_gguf
from hpcdecode.model.frontend.gguf.folder import gguf_files
from hpcdecode.model.frontend.lora_merge import merged
from hpcdecode.model.frontend.meta import tensor_meta
from hpcdecode.model.frontend.quantization.plain import plain_tensors
from hpcdecode.model.frontend.quantization.scheme import Scheme
from hpcdecode.model.frontend.quantization.unread import refuse_unread
from hpcdecode.model.frontend.readers import adapter_targets, stackable, tables_of
from hpcdecode.model.frontend.tensors import CheckpointTensor
from hpcdecode.model.frontend.trace import Trace
from hpcdecode.model.frontend.weights import Weights, weight_key
from hpcdecode.model.lower.packed_weights import PRIVATE
from hpcdecode.system.shared_memory import WeightMemory


def open_plain(
    folder: Path, layers: int | None, scheme: Scheme | None, dtype: torch.dtype
) -> Mapping[str, CheckpointTensor]:
    """Return the tensors of a checkpoint by the keys that it would have unquantised.

    Args:
        folder: Model directory.
        layers: Number of layers that config.json states, or None.
        scheme: How its weights are quantised, or None.
        dtype: Dtype that quantised weights are rounded to.

    Raises:
        UserError: If the checkpoint is incomplete or damaged.
    """
    if files := gguf_files(folder):
        return open_gguf(files, dtype)
    tensors = open_checkpoint(folder, layers)
    return tensors if scheme is None else plain_tensors(tensors, scheme, dtype)


def bound_weights(
    folder: Path,
    tensors: Mapping[str, CheckpointTensor],
    traced: Trace,
    own: Trace,
    device: torch.device,
    scheme: Scheme | None,
    lora: str | None = None,
    adapters: Mapping[str, str] | None = None,
    tables: WeightMemory = PRIVATE,
    mtp: bool = False,
) -> Weights:
    """Return the weights, and parts of weights, that the nodes of a trace use; let adapters update its projections.

    Args:
        folder: Model directory.
        tensors: Tensors of its checkpoint by the keys that it would have unquantised.
        traced: Trace of the whole model.
        own: The trace: the same, or that of a member.
        device: Device to read the weights to.
        scheme: How its weights are quantised, or None.
        lora: Directory of an adapter to merge, or None.
        adapters: Directories of adapters that update `own`, by name.
        tables: Where tables are put that are made at load.
        mtp: Whether the traces are of the model's layer for multi-token prediction.

    Raises:
        UserError: If weights are missing, or quantised in a way that is not known; if the adapter is not the model's.
    """
    wanted = {name: tensor_meta(node) for node, name in traced.weights.items() if node.users}
    sources = cached_sources(folder, traced.dtype, list(tensors), set(wanted), stackable(traced), mtp)
    if not mtp:  # of the others the model has been asked
        refuse_unread(tensors, sources, wanted, scheme)
    keys = {weight_key(own, node): tensor_meta(node) for node in own.weights if node.users}
    targets = adapter_targets(traced) if lora is not None or adapters else {}
    if lora is not None:
        tensors = merged(tensors, sources, targets, Path(lora))
    if adapters:
        add_adapters(own, adapters, sources, targets, tensors)
    return Weights(folder, tensors, sources, keys, device, tables_of(own), tables)
