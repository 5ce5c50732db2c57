"""Run by mpiexec on up to four ranks: draw mixes, and look for rows that are not as alone.

usage: run_mixes.py FOLDER MODEL=DIRECTORY COUNT SEED [--corpus FILE...] [--dtype DTYPE] [--tolerance X] [--tp K]
       [--preempts X] [--tiers host|file|torn] [--rotates host|file] [--score] [--adapters] [--weights FORM]
       [--activations int8] [--kv-dtype DTYPE] [--guesses lookup|wild|known|model|mtp]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from mpi4py import MPI

from hpcdecode._ops_cpu import Product, Type
from hpcdecode.attention.base import isa
from hpcdecode.mpi.collectives import broadcast
from hpcdecode.system.model_path import find_model
from tests.differential.company import Company
from tests.differential.contents import Contents, difference, of_line
from tests.differential.mixes import mixes, scored_mixes
from tests.differential.mutations import MUTATIONS
from tests.support.fusing import Fused
from tests.support.guessing import GUESSES, MTP, Guessed, Known, name_of
from tests.support.preemption import HastyPlacement
from tests.support.swapping import TIERS, Moves

WORLD = MPI.COMM_WORLD
_END = "end"


class Different(AssertionError):
    """A row in company is not as alone."""


def main() -> int:
    options = _options()
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    models = dict(option.split("=", 1) for option in [options.model])
    adapters = _adapters(folder, *models.values()) if options.adapters else {}
    forms = options.weights, options.activations
    company = Company(folder, models, options.dtype, options.tp, adapters, *forms, mtp=options.guesses == MTP)
    if WORLD.rank:
        return _follow(company)
    code, found = 0, []
    try:
        _lead(company, options, found)
    except Exception as error:
        if not found and not options.mutation:
            raise
        found.append(f"mix {company.mixes}\nENDED {type(error).__name__}: {error}")
        print(f"DIFFERENT\n{found[0]}", flush=True)  # later ones repeat it, if what was on disk at a crash lets them
        code = 1
    broadcast(WORLD, _END, str)
    return code


def _adapters(folder: Path, model: str) -> dict[str, str]:
    """Return the directories of four random adapters of a model by name, which rank 0 writes."""
    made: dict[str, str] = {}
    if WORLD.rank == 0:
        from tests.support.adapters import four  # takes seconds

        made = four(find_model(model, {}), folder / "adapters")
    return broadcast(WORLD, made, dict[str, str])


def _follow(company: Company) -> int:
    """Take part in what rank 0 runs."""
    while (text := broadcast(WORLD, "", str)) != _END:
        mix = json.loads(text)
        if mix.pop("alone", None) is None:
            company.run(mix)
        else:
            _all_alone(company, mix)
    return 0


def _all_alone(company: Company, mix: dict) -> dict[int, Contents]:
    """Run every row alone; all ranks call this if several share the weights."""
    return {line: company.alone(mix, line) or {} for line in range(1, len(mix["rows"]) + 1)}


def _known(alone: dict[int, Contents]) -> Known:
    """Return what the samples of rows generate alone."""
    held = {line: of_line(one, "rows", line) for line, one in alone.items()}
    return {
        name_of(line, sample): tokens.tolist()
        for line, row in held.items()
        for sample, tokens in zip(
            row.get("sample", [0] * len(row.get("token_ids", []))), row.get("token_ids", []), strict=True
        )
    }


def _lead(company: Company, options: argparse.Namespace, found: list[str]) -> None:
    """Run corpus and drawn mixes; the first difference is appended to `found` and raised."""
    start = time.monotonic()
    name = options.model.split("=")[0]
    kept = company.folder / "different.txt"  # a launcher that aborts may lose what is printed

    def check(mix: dict) -> None:
        company.mixes += 1
        if options.preempts is not None:
            for run in mix["runs"]:
                run |= {"admission": "optimistic", "preempts": options.preempts}
                run |= {"tiers": options.tiers} if options.tiers else {}
        for run in mix["runs"] if options.rotates else ():
            run["rotates"] = options.rotates
            run.pop("fuses", None)
        for run in mix["runs"] if options.guesses else ():
            run |= {"guesses": options.guesses}
            run.pop("rotates", None)
        mix |= {"kv_dtype": options.kv_dtype} if options.kv_dtype else {}
        if options.guesses == "known" and company.tp == 1:
            mix["known"] = _known(_all_alone(company, mix))
        text = json.dumps(mix)
        (company.folder / "current.json").write_text(text)
        broadcast(WORLD, text, str)
        try:
            with MUTATIONS[options.mutation]() if options.mutation else nullcontext():
                whole = company.run(mix)
        except Exception:
            kept.write_text(f"{text}\n{traceback.format_exc()}")
            raise
        if company.tp > 1:
            broadcast(WORLD, json.dumps(mix | {"alone": True}), str)
        alone = _all_alone(company, mix)
        if different := difference(mix, whole, alone, options.tolerance):
            found.append(f"mix {company.mixes}\n{text}\n{different}")
            kept.write_text(found[-1])
            raise Different

    for path in options.corpus:
        check(json.loads(Path(path).read_text()) | {"model": name})
    draw = scored_mixes if options.score else mixes
    drawn = given(draw(name, options.chat, options.rows, tuple(company.adapters)))(check)
    phases = [Phase.generate, Phase.shrink] if options.shrink else [Phase.generate]
    checks = settings(
        max_examples=max(options.count, 1),
        phases=phases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        report_multiple_bugs=False,
    )
    if options.count:
        seed(options.seed)(checks(drawn))()
    left = f"{HastyPlacement.chosen} preemptions, {Moves.count} to tiers, {Moves.lost} of them lost, "
    left += f"{Guessed.right} of {Guessed.tokens} guesses right, "
    left += f"{Fused.steps} steps fused that were to be, {Fused.with_adapters} of them with adapters"
    print(f"SAME {company.mixes} mixes, {left}, seed {options.seed}, {time.monotonic() - start:.0f} s", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("folder")
    add("model")
    add("count", type=int)
    add("seed", type=int)
    add("--corpus", nargs="*", default=[])
    add("--dtype", default="float32")
    add("--tp", type=int, default=1, help="ranks that share the weights, in company and alone")
    add("--adapters", action="store_true", help="rows may choose one of four adapters, of a model with Llama's names")
    add("--weights", help="form of the projections' weights, in company and alone")
    add("--activations", help="as which GEMMs by weights in few bits take them, in company and alone")
    add("--kv-dtype", help="of the KV cache, in company and alone")
    add("--tolerance", type=float, help="default: 0 where products do not depend on the rows beside them")
    add("--rows", type=int, default=12)
    add("--chat", action="store_true")
    add("--shrink", action="store_true")
    add("--mutation")
    add("--score", action="store_true", help="mixes of rows that are scored")
    add("--tiers", choices=TIERS, help="where rows go that are preempted, of all runs")
    add("--rotates", choices=("host", "file"), help="tiers of KV caches that are larger than memory, of all runs")
    add("--guesses", choices=(*GUESSES, MTP), help="how tokens are guessed ahead, of all runs")
    add("--preempts", type=float, help="share of the steps at which all runs preempt")
    options = parser.parse_args()
    if options.tolerance is None:
        kind = Type[options.dtype]
        options.tolerance = 0.0 if Product.offered(kind, kind, isa()) else 1e-4
    return options


if __name__ == "__main__":
    sys.exit(main())
