"""Tokens/s of whole jobs by where S and R are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hpcdecode.bench.contenders import Hpcdecode, Site
from hpcdecode.bench.output import Case
from hpcdecode.bench.workload import Workload
from hpcdecode.report.benchmark import case, seconds_of


@dataclass(frozen=True)
class Arrangement:
    """Where S and R of a job are.

    Attributes:
        name: As printed.
        ranks: Number of ranks.
        lanes: Of the S-rank; 0 if its slices are not those that are measured alone.
        flags: Of `hpcdecode generate`.
    """

    name: str
    ranks: int
    lanes: int
    flags: tuple[str, ...]


def worlds(nodes: int, gpus: int) -> list[Arrangement]:
    """Return the arrangements of a host by NUMA nodes and GPUs; the first has all of it in one process on a GPU."""
    both, s_only = ("--device", "cuda", "--r-device", "cuda"), ("--device", "cuda", "--s-ranks", "1")
    found = [
        Arrangement("S and R on one GPU", 1, 1, both),
        Arrangement("S and R on one GPU, compiled slices", 1, 0, (*both, "--compile")),
        Arrangement("S on a GPU, R on the CPUs", 1 + nodes, 2, s_only),
        Arrangement(
            f"S and R on GPUs, {'each on one' if gpus > 1 else 'which is one'}", 2, 2, (*both, "--s-ranks", "1")
        ),
    ]
    if gpus > 1:
        found.append(Arrangement("S on a GPU, R on GPUs and CPUs", 2 + nodes, 2, (*s_only, "--r-device", "auto")))
    return [*found, Arrangement("all on the CPUs", 1, 0, ("--device", "cpu"))]


def jobs(
    site: Site,
    work: Workload,
    among: Sequence[Arrangement],
    flags: Sequence[str],
    batch: int,
    slice_seconds: dict[int, float],
) -> Iterator[Case]:
    """Yield tokens/s of whole jobs, against the first arrangement.

    Args:
        site: Where everything lies.
        work: The rows.
        among: Arrangements.
        flags: Of all of them.
        batch: B.
        slice_seconds: Of a lane's step, by number of lanes.
    """
    made, first = work.rows * work.new, 0.0
    for world in among:
        run = Hpcdecode(site, world.ranks, [*flags, *world.flags]).run(work)
        rate = made / run.seconds
        first = first or rate
        yield case(f"job, {world.name}", [rate], "tokens/s", among[0].name, [rate / first])
        if world.lanes:
            steps = (made - work.rows) / (batch // world.lanes)
            busy = steps * slice_seconds[world.lanes] / run.decode_seconds
            name = f"S-rank idle while rows decode, {world.name}"
            yield case(name, [100 * (1 - busy)], "% of the time", "slices alone, busy", [busy])


def by_transformers(site: Site, work: Workload, reference: Case) -> Case:
    """Return tokens/s of transformers' continuous batching on the GPU, against a job."""
    rate = _by_transformers(site.checkpoint, work.prompts(site.shape), work.new)
    name = reference["case"].removeprefix("job, ")
    return case("job, transformers' continuous batching", [rate], "tokens/s", name, [rate / reference["value"]])


def _by_transformers(folder: Path, prompts: list[list[int]], new: int) -> float:
    """Return tokens/s of transformers' continuous batching on the GPU."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model = loaded.eval().to("cuda")  # type: ignore[no-untyped-call]  # transformers leaves it untyped
    config = GenerationConfig(  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    model.generate_batch(prompts[:4], generation_config=config)
    return len(prompts) * new / seconds_of(lambda: model.generate_batch(prompts, generation_config=config))
