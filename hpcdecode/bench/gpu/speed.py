"""The first day's figures: attention, slices, transfers, jobs and compiling, against what is expected of them."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import traceback
from collections.abc import Iterable

import torch

from hpcdecode.bench.contenders import Site
from hpcdecode.bench.gpu.attention import HEADS, attention, latents
from hpcdecode.bench.gpu.commands import run
from hpcdecode.bench.gpu.findings import Conditions, Findings, PartSkipped
from hpcdecode.bench.gpu.jobs import Arrangement, by_transformers, jobs, worlds
from hpcdecode.bench.gpu.slices import slices, step_seconds
from hpcdecode.bench.gpu.states import states
from hpcdecode.bench.gpu.transfers import transfers
from hpcdecode.bench.gpu.weights import LARGE, expanding
from hpcdecode.bench.workload import Workload, checkpoint
from hpcdecode.exchange.device import CudaCopies
from hpcdecode.model import SplitModel, load_split

_PASSES = 5
_OF_COPYING = {"bfloat16": 0.7, "int8": 0.45, "k8v4": None, "int4": None}  # of GQA4 d128, least
_OF_PRODUCTS = {64: 0.55, 256: 0.8, 1024: 0.85}  # of bare GEMMs by sequences, least
_ADDED = 0.3  # of the copies alone, most
_SECONDS = 90  # of a process that compiles
_FASTER = 0.7  # seconds of a second start, as a share of the first


def attention_rates(on: Conditions, findings: Findings) -> None:
    """Measure attention by data type, over latents and of states, against copying."""
    batch, context, passes = (2, 70, 1) if on.emulated else (64, 2048, _PASSES)
    for kv_dtype, least in _OF_COPYING.items():
        for case in attention(on.device, batch, [context], [kv_dtype], passes, HEADS[1:2]):
            findings.figure(case, None if on.emulated else least)
    if on.emulated:
        findings.figures_of(latents(on.device, batch, [context], ["bfloat16"], passes, ["glm-4.7-flash"]))
        return
    findings.figures_of(attention(on.device, batch, [context], ["bfloat16"], passes, [HEADS[0], HEADS[2]]))
    findings.figures_of(attention(on.device, 4 * batch, [context], ["bfloat16", "int8"], passes, HEADS[1:2]))
    findings.figures_of(attention(on.device, 4, [8 * context], ["bfloat16"], passes, HEADS[1:2]))
    findings.figures_of(latents(on.device, batch, [context], ["bfloat16"], passes))
    findings.figures_of(states(on.device, batch, passes, ["gated-deltanet", "mamba2"]))


def slice_times(on: Conditions, findings: Findings) -> None:
    """Measure slices, plain and compiled, launched and recorded, against bare GEMMs; check the best of each size.

    With weights in few bits, too.
    """
    site, best = Site(on.work, on.model), dict.fromkeys(() if on.emulated else _OF_PRODUCTS, 0.0)
    for inductor in (False,) if on.emulated else (False, True):
        model, name = _loaded(on, inductor), "compiled slices" if inductor else "slices"
        if on.emulated:
            findings.figures_of(slices(model, site.shape, 3, 1, name))
        for batch in best:
            findings.figures_of(slices(model, site.shape, batch, _PASSES, name))
            best[batch] = max(best[batch], findings.figures[-1]["ratio"])
            try:
                findings.figures_of(slices(model, site.shape, batch, _PASSES, f"{name} as CUDA graphs", recorded=True))
                best[batch] = max(best[batch], findings.figures[-1]["ratio"])
            except RuntimeError:  # what was not recorded is not measured
                findings.note(f"{name} as CUDA graphs, {batch} sequences", traceback.format_exc())
        del model
        _free()
    _few_bits(on, site, best, findings)
    for batch, ratio in best.items():
        least = _OF_PRODUCTS[batch]
        findings.check(f"slices, the best, {batch} sequences", f">= {least} of bare products", ratio, ratio >= least)


def _few_bits(on: Conditions, site: Site, batches: Iterable[int], findings: Findings) -> None:
    """Measure how fast weights in few bits are expanded, and slices that do so."""
    size, passes = ((96, 512), 1) if on.emulated else (LARGE, _PASSES)
    findings.figures_of(expanding(on.device, size, passes))
    if not on.emulated:
        model = _loaded(on, False, "int4")
        for batch in batches:
            findings.figures_of(slices(model, site.shape, batch, passes, "slices, int4 weights"))
        del model
        _free()


def transfer_times(on: Conditions, findings: Findings) -> None:
    """Measure what copies to the host and back add to slices.

    Raises:
        PartSkipped: If there is no GPU.
    """
    if on.emulated:
        raise PartSkipped("copies need a GPU; tests/exchange emulates them")
    model = _loaded(on, False)
    for batch in _OF_PRODUCTS:
        for case in transfers(model, CudaCopies(on.device), batch, _PASSES):
            # steps of few sequences wait for launches, those of copies too
            findings.figure(case, most=_ADDED if batch == max(_OF_PRODUCTS) else None)


def job_rates(on: Conditions, findings: Findings) -> None:
    """Measure tokens/s of whole jobs by where S and R are."""
    site, batch = Site(on.work, on.model), 4 if on.emulated else 256
    model = _loaded(on, False)
    alone = {lanes: step_seconds(model, batch // lanes, 1 if on.emulated else _PASSES) for lanes in (1, 2)}
    del model
    _free()
    work = Workload("first-day", 6, 4, 9, 3) if on.emulated else Workload("first-day", 512, 256, 512, 64)
    among = [world for world in worlds(1, torch.cuda.device_count()) if _takes_little_time(world)]
    if on.emulated:
        among = [Arrangement(f"emulated, {n} ranks", n, 0, ("--device", "cpu")) for n in (1, 2)]
    findings.figures_of(jobs(site, work, among, ["--batch", str(batch)], batch, alone))
    if not on.emulated:
        try:
            findings.figure(by_transformers(site, work, findings.figures[0]))
        except Exception:  # of a peer: no surprise of hpcdecode
            findings.note("transformers' continuous batching", traceback.format_exc())


def _takes_little_time(world: Arrangement) -> bool:
    """Return whether a job uses a GPU and compiles nothing."""
    return "cuda" in world.flags and "--compile" not in world.flags


def compiling(on: Conditions, findings: Findings) -> None:
    """Compile slices in two processes: the second takes from the cache what the first has compiled."""
    cache = on.folder / "compiled"
    shutil.rmtree(cache, ignore_errors=True)
    environment = {"HPCDECODE_CACHE": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor")}
    seconds = []
    for start in ("first", "second"):
        line = [sys.executable, "-m", "hpcdecode.bench.gpu.compiled", str(checkpoint(on.work, "tiny")), str(on.device)]
        code, text = run(line, _SECONDS, environment)
        findings.check(f"{start} start", "exit code 0", code if code == 0 else f"{code}: {text}", code == 0)
        if code != 0:
            return
        found = json.loads(text[text.rindex('{"load"') :])
        findings.note(f"seconds of the {start} start", found)
        seconds.append(found["load"] + sum(found["steps"]))
    share = seconds[1] / seconds[0]
    findings.check("second start, of the first", f"<= {_FASTER}", share, share <= _FASTER)


def _loaded(on: Conditions, inductor: bool, weights: str | None = None) -> SplitModel:
    directory = checkpoint(on.work, on.model)
    return load_split(directory, dtype="bfloat16", device=on.device, inductor=inductor, quantised=weights)


def _free() -> None:
    """Give back memory of what is dropped."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
