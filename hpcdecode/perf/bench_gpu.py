"""`hpcdecode bench gpu`: what a GPU does as S-rank, as R-rank and as both, against what it allows.

A random Llama checkpoint is made once and kept in the work folder. Attention is verified against float64 first.
attention: GB/s of attn_cuda against copying on the device. slices: a step's slices and logits of B sequences against
their bare matrix products. transfers: the seconds that the copies of a step add to its slices, against what they take
alone. jobs: tokens/s of whole jobs in one process, by where S and R are, the first of them all on the GPU, and of
transformers' continuous batching; --kv-memory bounds the KV cache where it lies on the GPU, as a smaller card would.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from hpcdecode.attention import LayerShape
from hpcdecode.attention_cuda import CudaStore, state
from hpcdecode.errors import UserError
from hpcdecode.exchange.staging import Copies, CudaCopies, Mark
from hpcdecode.job import parse_bytes
from hpcdecode.llm import LLM
from hpcdecode.model import SplitModel, load_split
from hpcdecode.perf import filled
from hpcdecode.perf.result import case, machine, seconds_of
from hpcdecode.perf.workload import SHAPES, Shape, Workload, checkpoint, default_folder
from hpcdecode.sampling.params import SamplingParams

_ON_GPU = {"device": "cuda", "r_device": "cuda"}
_WORLDS = {
    "S and R on the GPU": _ON_GPU,
    "S on the GPU, R on the CPU": {"device": "cuda"},
    "all on the CPU": {"device": "cpu"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", choices=tuple(SHAPES), default="355m", help="checkpoint to make (%(default)s)")
    add("--batch", type=int, nargs="+", default=[64, 256, 1024], help="(default: 64 256 1024)")
    add("--context", type=int, nargs="+", default=[2048, 8192], help="tokens of a sequence (default: 2048 8192)")
    add("--kv-dtype", nargs="+", default=["bfloat16", "int8"], help="(default: bfloat16 int8)")
    add("--rows", type=int, default=512, help="of the jobs (%(default)s)")
    add("--new-tokens", type=int, default=128, help="of every row (%(default)s)")
    add("--gpu-memory", type=parse_bytes, metavar="SIZE", help="that jobs take of the GPU at most, such as 24G")
    add("--passes", type=int, default=9)
    add("--work", type=Path, default=default_folder(), metavar="DIR", help="checkpoints (%(default)s)")


def run(args: argparse.Namespace) -> dict:
    """Raises UserError where there is no GPU."""
    if not torch.cuda.is_available():
        raise UserError(f"bench gpu: expected a GPU and a CUDA build of torch, found none (hpcdecode: {state()})")
    device = torch.device("cuda", 0)
    args.work.mkdir(parents=True, exist_ok=True)
    folder, shape = checkpoint(args.work, args.model), SHAPES[args.model]
    cases = [*attention(device, args.batch[0], args.context, args.kv_dtype, args.passes)]
    model = load_split(folder, dtype="bfloat16", device=device)
    for batch in args.batch:
        cases += slices(model, shape, batch, args.passes)
        cases += transfers(model, CudaCopies(device), batch, args.passes)
    del model
    work = Workload("gpu", args.rows, 256, 512, args.new_tokens)
    cases += jobs(folder, work.prompts(shape), work.new, max(args.batch), args.gpu_memory)
    about = {**machine(), "gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return {"bench": "gpu", "machine": about, "cases": cases}


def attention(
    device: torch.device, batch: int, contexts: list[int], kv_dtypes: list[str], passes: int
) -> Iterator[dict]:
    """One layer of a Llama-like model, `batch` sequences of each context."""
    for group, dim in ((1, 128), (4, 128), (8, 64)):
        shape = LayerShape(8, dim, dim, 8 * group, dim**-0.5)
        for kv_dtype in kv_dtypes:
            filled.verify(_opened(shape, kv_dtype, filled.LENGTHS, device), shape, kv_dtype, device)
            for context in contexts:
                yield _attention_case(shape, kv_dtype, device, batch, context, passes)


def _attention_case(
    shape: LayerShape, kv_dtype: str, device: torch.device, batch: int, context: int, passes: int
) -> dict:
    lengths = (context,) * batch
    store = _opened(shape, kv_dtype, lengths, device)
    filled.fill(store, shape, lengths, device)
    slots, counts, qkv, out = filled.decode(shape, batch, device)
    half = torch.empty(store.bytes // 2, dtype=torch.uint8, device=device)
    other = torch.empty_like(half)
    rates, ratios = [], []
    for _ in range(passes + 1):
        floor = 2 * len(half) / _seconds(lambda: other.copy_(half), device)
        before = store.bytes_read
        seconds = _seconds(lambda: store.attend(0, slots, counts, qkv, out), device)
        rates.append((store.bytes_read - before) / seconds)
        ratios.append(rates[-1] / floor)
    name = f"attention, {kv_dtype}, GQA{shape.group} d{shape.k_dim}, {batch} sequences of {context}"
    return case(name, [r / 1e9 for r in rates[1:]], "GB/s", "copying on the device", ratios[1:])


def _opened(shape: LayerShape, kv_dtype: str, lengths: tuple[int, ...], device: torch.device) -> CudaStore:
    return CudaStore([shape], kv_dtype, filled.capacity(lengths), len(lengths), None, device)


def slices(model: SplitModel, shape: Shape, batch: int, passes: int) -> Iterator[dict]:
    """A step of `batch` decoding sequences, without its attention."""
    x = {n: torch.randn(batch, n, dtype=model.dtype, device=model.device) for n in {n for n, _ in shape.linears}}
    sizes = [*shape.linears, (shape.hidden, shape.vocabulary)]
    weights = [torch.randn(m, n, dtype=model.dtype, device=model.device) for n, m in sizes]

    def products() -> None:
        for _ in range(shape.layers):
            for weight in weights[:-1]:
                torch.nn.functional.linear(x[weight.shape[1]], weight)
        torch.nn.functional.linear(x[shape.hidden], weights[-1])

    step, times, ratios = step_of(model, batch), [], []
    with torch.inference_mode():
        for _ in range(passes + 1):
            limit = _seconds(products, model.device)
            times.append(_seconds(step, model.device))
            ratios.append(limit / times[-1])
    yield case(f"slices, {batch} sequences", [t * 1e3 for t in times[1:]], "ms a step", "bare products", ratios[1:])


def step_of(model: SplitModel, batch: int, between: Callable = lambda *_: None) -> Callable[[], None]:
    """A step of all slices; `between` is called with q, k, v and o of every layer."""
    ids = torch.arange(batch, device=model.device) % model.vocab_size
    outs = [torch.zeros(batch, s.out_columns, dtype=model.dtype, device=model.device) for s in model.attends]

    def step() -> None:
        o, context = None, (ids, ids * 0 + 7, torch.arange(batch, device=model.device))
        for layer, out in enumerate(outs):
            q, k, v, context = model.slice(layer, o, context)
            between(q, k, v, out)
            o = out
        model.logits(o, context)

    return step


def transfers(model: SplitModel, copies: Copies, batch: int, passes: int) -> Iterator[dict]:
    """What the copies of one lane add to the slices of another: both are told to the device at once."""
    s = max(model.attends, key=lambda s: s.row_columns)
    there = torch.zeros(batch, s.row_columns, dtype=model.dtype, device=model.device)
    back = torch.zeros(batch, s.out_columns, dtype=model.dtype, device=model.device)
    hosts = [copies.pinned(*x.shape, x.dtype) for x in (there, back)]

    last: list[Mark] = []

    def copy(*_: Tensor) -> None:
        if last:  # o of the other lane comes back while this one's slice runs
            copies.into([(back, hosts[1])], last.pop())
        last.append(copies.out([(hosts[0], there)]))

    def only_copies() -> None:
        for _ in model.attends:
            copy()

    alone, beside, added, ratios = step_of(model, batch), step_of(model, batch, copy), [], []
    with torch.inference_mode():
        for _ in range(passes + 1):
            own, step, both = (_seconds(work, model.device) for work in (only_copies, alone, beside))
            added.append(max(both - step, 0.0))
            ratios.append(added[-1] / own)
    name = f"transfers, {batch} sequences: what they add to a step"
    yield case(name, [t * 1e3 for t in added[1:]], "ms a step", "the copies alone", ratios[1:])


def jobs(
    folder: Path, prompts: list[list[int]], new: int, batch: int, memory: int | None, worlds: dict = _WORLDS
) -> Iterator[dict]:
    """Tokens/s of whole jobs; the ratio is to the first world's."""
    params, rows = SamplingParams(max_tokens=new, ignore_eos=True), [{"prompt_token_ids": p} for p in prompts]
    first = None
    for name, options in worlds.items():
        llm = LLM(str(folder), dtype="bfloat16", batch=batch, gpu_memory=memory, **options)
        llm.generate(rows[:4], params, use_tqdm=False)
        rate = len(rows) * new / seconds_of(lambda llm=llm: llm.generate(rows, params, use_tqdm=False))
        del llm
        _forget()
        first = first or rate
        yield case(f"job, {name}", [rate], "tokens/s", next(iter(worlds)), [rate / first])
    if torch.cuda.is_available():
        rate = _by_transformers(folder, prompts, new)
        yield case("job, transformers' continuous batching", [rate], "tokens/s", next(iter(worlds)), [rate / first])


def _by_transformers(folder: Path, prompts: list[list[int]], new: int) -> float:
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval().to("cuda")
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.generate_batch(prompts[:4], generation_config=config)
    return len(prompts) * new / seconds_of(lambda: model.generate_batch(prompts, generation_config=config))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Of `work` and all that it tells the device."""
    _wait(device)
    return seconds_of(lambda: (work(), _wait(device)))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
