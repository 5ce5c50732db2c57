"""Run a mix over the ranks of a world, run each of its rows alone, and say how they differ."""

from __future__ import annotations

import functools
import gc
import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from mpi4py import MPI

from hpcdecode.attention.shapes import MixerShape, attention_shapes, recurrent_shapes, state_bytes
from hpcdecode.config import Job
from hpcdecode.data.prompts import first_rows
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.data.results import writer as results
from hpcdecode.errors import UserError
from hpcdecode.exchange.partition import Partition
from hpcdecode.generate import ROW_ERRORS, generate
from hpcdecode.model import SplitModel, load_split
from hpcdecode.model.frontend.choose import takes_choice
from hpcdecode.mpi.collectives import broadcast
from hpcdecode.requests.params import SamplingParams
from hpcdecode.requests.speculative import SpeculativeConfig
from hpcdecode.system.model_path import find_model
from hpcdecode.system.signals import DRAINED
from tests.differential.contents import Contents, Mix, contents
from tests.support.fusing import fusing
from tests.support.guessing import EAGER, MTP, guessing
from tests.support.preemption import hasty
from tests.support.rotating import spoilt_frames
from tests.support.stop_after import StopAfter, copy, kept, remove
from tests.support.swapping import TIERS, free_moves

WORLD = MPI.COMM_WORLD
STALL_SECONDS = 60
MIN_ROTATED, MOST_ROTATED = 1 << 22, 1 << 28  # bytes of KV cache
STATE_TOKENS = 64  # tokens whose memory has room for one state beside them


class Company:
    """Runs mixes; used by all ranks of the world at once.

    Args:
        folder: for prompt files and results.
        models: directories by the names that mixes have.
        dtype: of weights, activations and KV cache.
        tp: ranks that share the weights, also for a row alone.
        adapters: directories of adapters that rows may choose, by name. Rows that have none run alone without any.
        weights: form of the projections' weights, None for `dtype`.
        activations: `int8` to round them for GEMMs by weights in few bits.
        mtp: whether runs guess by the models' layers for multi-token prediction.
    """

    def __init__(
        self,
        folder: Path,
        models: dict[str, str],
        dtype: str = "float32",
        tp: int = 1,
        adapters: dict[str, str] | None = None,
        weights: str | None = None,
        activations: str | None = None,
        mtp: bool = False,
    ):
        self.folder, self.dtype, self.tp, self.weights, self.activations = folder, dtype, tp, weights, activations
        self.adapters, self.mtp = adapters or {}, mtp
        self.models = {name: find_model(path, {}) for name, path in models.items()}
        self._loaded: dict[tuple[str, bool], SplitModel] = {}  # by name, and whether it has adapters
        self._alone: dict[str, Contents] = {}
        self.mixes = 0  # run so far
        self._cpus = os.sched_getaffinity(0)
        first_rows.FIRST_ROWS = 0  # a row alone may be one that cannot be used: its reason is compared
        results.COST_SHARE = 1.0  # commits as often as they are asked for: a job here lasts for less than a second
        Tokenizer.load = functools.cache(Tokenizer.load)
        for name in self.models:
            self._model(name)
        gc.freeze()  # once: a job would freeze what the ones before it left
        gc.freeze = lambda: None

    def run(self, mix: Mix) -> Contents | None:
        """Run the job of a mix to its end; its contents on rank 0, None on the others."""
        output = self.folder / "company.h5"
        if WORLD.rank == 0:
            remove(output)
            self._write([json.dumps(row) for row in mix["rows"]], "company.jsonl")
        for run in mix["runs"]:
            self._run_once(mix, run, output)
        return contents(output) if WORLD.rank == 0 else None

    def alone(self, mix: Mix, line: int) -> Contents | None:
        """Run the row of a line alone in one process, or over as many ranks as share the weights; on rank 0 return it.

        All ranks call it if several share the weights.
        """
        key = json.dumps([mix["model"], mix.get("score"), mix["flags"], line, mix["rows"][line - 1]])
        if key not in self._alone:
            output = self.folder / "alone.h5"
            if WORLD.rank == 0:
                remove(output)
                self._write([""] * (line - 1) + [json.dumps(mix["rows"][line - 1])], "alone.jsonl")
            plain = mix["rows"][line - 1].get("lora") is None
            job = self._job(mix, "alone.jsonl", output, {"tp": self.tp} | ({"adapters": {}} if plain else {}))
            if self.tp == 1:
                assert generate(job, None, model=self._model(mix["model"], plain)) in (0, ROW_ERRORS)
            else:
                self._together(job)
            gc.collect()
            self._alone[key] = contents(output) if WORLD.rank == 0 else {}
        return self._alone[key]

    def _together(self, job: Job) -> None:
        broadcast(WORLD, 0, int)  # files of rank 0 are there
        comm = WORLD.Split(0 if WORLD.rank < self.tp else MPI.UNDEFINED)
        if comm != MPI.COMM_NULL:
            assert generate(job, comm) in (0, ROW_ERRORS)
            os.sched_setaffinity(0, self._cpus)
            comm.Free()
        broadcast(WORLD, 0, int)

    def _run_once(self, mix: Mix, run: dict[str, Any], output: Path) -> None:
        shapes, mixers = self._model(mix["model"]).attends, self._model(mix["model"]).split.trace.attends
        begins = sum(not takes_choice(mixer) for mixer in mixers)  # stages begin at these
        pp = min(run.get("pp", 1), begins, WORLD.size // self.tp)
        run = {**run, "pp": pp}
        if any(shape.chooses_from is not None for shape in attention_shapes(shapes)):  # which no other route takes
            run |= {"route": "fixed"}
        size = self.tp * run["pp"]
        ranks = max(min(run["ranks"], WORLD.size) // size * size, size)
        broadcast(WORLD, 0, int)  # files of rank 0 are there
        comm = WORLD.Split(0 if WORLD.rank < ranks else MPI.UNDEFINED)
        if comm != MPI.COMM_NULL:
            signals = StopAfter(run["stop"] if WORLD.rank == 0 else None, output, run["crash"])
            options = self._options(mix, run, ranks)
            s_ranks = options.get("s_ranks", ranks) + options.get("prefill_ranks", 0)
            if fuses := options.pop("fuses", None):  # which only one lane with all of its KV cache in memory can
                options |= {"lanes": 1}
                options.pop("rotates", None)
            rate = options.pop("preempts", None) if "admission" in options else None
            options.pop("preempts", None)
            rotates = options.pop("rotates", None)
            if rotates and self._rotates(mix["model"], options, size):
                tier = {"host": "host:{size}", "file": "nvme:{folder}:{size}"}[rotates]
                kv_memory = options["kv_memory"]
                options |= {"schedule": "fluid", "kv_memory": max(kv_memory // 2, MIN_ROTATED)}
                options["kv_swap"] = (tier.format(folder=self.folder, size=2 * max(kv_memory, MIN_ROTATED)),)
                options.pop("tiers", None)
            tiers = options.pop("tiers", None) if "admission" in options else None
            options.pop("tiers", None)
            if tiers:
                options["kv_swap"] = (TIERS[tiers].format(folder=self.folder),)
            guesses = options.pop("guesses", None)
            if guesses := guesses if options.get("schedule") != "fluid" else None:
                options["speculative_config"] = self._guesses(mix["model"], guesses, shapes)
            model = self._model(mix["model"]) if comm.rank < s_ranks and size == 1 else None
            job = self._job(mix, "company.jsonl", output, {**options, "tp": self.tp})
            with (
                hasty(rate) if rate is not None else nullcontext(),
                free_moves(torn=tiers == "torn"),
                fusing(fuses) if fuses else nullcontext(),
                guessing(guesses, mix.get("known", {})) if guesses else nullcontext(),
                spoilt_frames(),
            ):
                code = generate(job, comm if ranks > 1 else None, model=model, signals=signals)
            assert code in (0, ROW_ERRORS, DRAINED), code
            os.sched_setaffinity(0, self._cpus)
            gc.collect()  # KV caches of gigabytes are held by cycles
            if signals.stopped and run["crash"] and WORLD.rank == 0:
                copy(kept(output), output)
            comm.Free()
        broadcast(WORLD, 0, int)

    def _guesses(self, name: str, how: str, shapes: Sequence[MixerShape]) -> SpeculativeConfig:
        """Settings of guesses; by the model itself in fewer bits if that can be, which is right and wrong."""
        if how == MTP:
            return SpeculativeConfig.of({"method": MTP, "num_speculative_tokens": 3})
        if how != "model" or recurrent_shapes(shapes):
            return EAGER
        return SpeculativeConfig.of({"model": self.models[name], "quantization": "int4", "num_speculative_tokens": 5})

    def _options(self, mix: Mix, run: dict[str, Any], ranks: int) -> dict[str, Any]:
        """Options of a run that its number of ranks and its model allow."""
        options = {k: v for k, v in run.items() if k not in ("ranks", "stop", "crash")}
        tokens, pools = options.pop("kv_tokens"), options.pop("pools", "shared")
        size = self.tp * options.get("pp", 1)
        if size > 1 and ranks < 2 * size:
            options["layout"] = "replicas"
        if options.get("layout") == "replicas" or size > 1 or ranks < 3 or options.get("s_ranks", 1) == 1:
            options.pop("route", None)
        if "route" in options:
            options.pop("exchange", None)
        prefill = options.pop("prefill_ranks", 0)
        if options.get("layout") == "replicas":
            options.pop("s_ranks", None), options.pop("partition", None)
            return options | {"kv_memory": tokens * self._kv_bytes(mix["model"])}
        s_ranks = min(options.get("s_ranks", 1), max(ranks - 1, 1)) if size == 1 else size
        prefill = prefill // s_ranks * s_ranks
        if prefill and size == 1 and s_ranks + prefill < ranks and not options.keys() & {"route", "exchange"}:
            options["prefill_ranks"] = prefill
            for name in ("tiers", "rotates"):
                options.pop(name, None)
        r_ranks = max(ranks - s_ranks - options.get("prefill_ranks", 0), 1)
        options |= {"s_ranks": s_ranks, "pools": pools if r_ranks >= s_ranks else "shared"}
        if options["pools"] == "own" or not self._deals_heads(mix["model"], r_ranks):
            options.pop("partition", None)
        return options | {"kv_memory": s_ranks * tokens * self._kv_bytes(mix["model"])}

    def _job(self, mix: Mix, prompts: str, output: Path, options: dict[str, Any]) -> Job:
        flags = {name: tuple(v) if isinstance(v, list) else v for name, v in mix["flags"].items()}
        return Job(
            prompts=(str(self.folder / prompts),),
            model=self.models[mix["model"]],
            output=str(output),
            params=SamplingParams(**flags),
            dtype=self.dtype,
            weights=self.weights,
            activations=self.activations,
            kv_dtype=mix.get("kv_dtype"),
            score=mix.get("score", False),
            checkpoint_every=0.001,
            stall_timeout=STALL_SECONDS,
            **{"kv_memory": 1 << 30, "adapters": self.adapters, **options},
        ).check()

    def _kv_bytes(self, name: str) -> int:
        """Bytes of a token's K and V in all layers, float32; so that states fit, some of theirs a token."""
        shapes = self._model(name).attends
        kv = sum(shape.kv_columns for shape in attention_shapes(shapes))
        return kv * 4 + state_bytes(shapes) // STATE_TOKENS

    def _rotates(self, name: str, options: dict[str, Any], size: int) -> bool:
        """Whether the KV caches of a run can be larger than their memory."""
        if size > 1 or "route" in options or options["kv_memory"] > MOST_ROTATED:
            return False
        shapes = self._model(name).attends
        attend = attention_shapes(shapes)
        if any(shape.chooses_from is not None for shape in attend):
            return False
        return len(attend) == len(shapes) > 2  # of two memory must hold more than some rows have

    def _deals_heads(self, name: str, parts: int) -> bool:
        """Whether heads can be dealt out to so many R-ranks."""
        try:
            Partition("head", parts).check(self._model(name).attends)
        except UserError:
            return False
        return True

    def _model(self, name: str, plain: bool = False) -> SplitModel:
        """Return a model, with the adapters unless it is plain."""
        key = name, bool(self.adapters) and not plain
        if key not in self._loaded:
            adapters = self.adapters if key[1] else {}
            self._loaded[key] = load_split(
                self.models[name],
                dtype=self.dtype,
                quantised=self.weights,
                adapters=adapters,
                int8_activations=self.activations is not None,
                hidden=self.mtp,
            )
        return self._loaded[key]

    def _write(self, lines: list[str], name: str) -> None:
        (self.folder / name).write_text("\n".join(lines) + "\n")
