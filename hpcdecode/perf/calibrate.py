"""A model's costs on this machine, measured: lanes in their steady state, on the ranks that a job would run on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch

from hpcdecode import launch
from hpcdecode.attention import LayerShape, bytes_per_token
from hpcdecode.errors import UserError
from hpcdecode.model import SplitModel, load_split
from hpcdecode.perf.cost import Cost
from hpcdecode.perf.fit import Sample, fit
from hpcdecode.perf.result import machine
from hpcdecode.perf.steady import Load, Steady

_BATCHES = (4, 16, 32, 64, 128, 256)
_SHORT, _LONG = 64, 1024  # tokens of context
_BESIDE = 32  # sequences beside prompts, and at long contexts
_PROMPTS = ((256, 32), (256, 128), (512, 512))  # tokens, and of them in a step
_TWO_LANES = (64, 256, 1024)  # contexts at which both sides work at once
_STEPS = 8
_KV_BYTES = 1 << 30  # of an R-rank at most


class Profile(msgspec.Struct, frozen=True):
    """ranks: on which it was measured, 1 for one process; spread: quartiles of the passes' steps over their median."""

    machine: dict[str, Any]
    model: str
    dtype: str
    kv_dtype: str
    ranks: int
    cost: Cost
    spread: dict[str, tuple[float, float]]


def read(path: str) -> Profile:
    """UserError if it is no profile."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{path}: expected a profile that hpcdecode calibrate wrote: {error}") from None


class Calibration:
    """Measures a model on one S-rank and the R-ranks of a team, or on one process that is both. Every rank calls the
    same methods. model: on the S-rank."""

    def __init__(self, team: launch.Team, model: SplitModel | None, directory: str, kv_dtype: str | None):
        torch.set_num_threads(team.me.threads)
        shapes = team.broadcast(list(model.attends) if model else None, list[LayerShape])
        self.team, self.directory = team, directory
        self.steady = Steady(team, shapes, model, kv_dtype)
        width = bytes_per_token(shapes, self.steady.kv_dtype)
        room = int(_KV_BYTES / width) * len(team.r_ranks)
        self.loads = [load for load in _loads(team.comm is not None) if load.batch * load.context <= room]
        self.samples: list[Sample] = []
        for load in self.loads:  # products have their kernels made, and are not counted
            self.steady.run(replace(load, steps=2))

    def measure(self) -> None:
        """One pass over all loads."""
        self.samples += [(load, self.steady.run(load)) for load in self.loads]

    def profile(self) -> Profile:
        """By the passes so far; the same on every rank."""
        steady = self.steady
        cost = fit(self.samples, len(steady.shapes))
        size = len(self.team.ranks)
        return Profile(machine(), self.directory, steady.dtype, steady.kv_dtype, size, cost, self._spread())

    def _spread(self) -> dict[str, tuple[float, float]]:
        steps = defaultdict(list)
        for load, ranks in self.samples:
            prompts = f", {load.chunk} of prompts of {load.prompt}" if load.prompt else ""
            steps[f"{load.lanes} x {load.lane_batch} at {load.context}{prompts}"].append(ranks[0]["step"])
        quartiles = {name: np.quantile(own, [0.25, 0.75]) / median(own) for name, own in steps.items()}
        return {name: (round(float(low), 3), round(float(high), 3)) for name, (low, high) in quartiles.items()}


def calibrate(comm, directory: str, dtype: str | None, kv_dtype: str | None, passes: int) -> Profile | None:
    """The profile, on the S-rank. UserError where the model cannot be loaded."""
    from hpcdecode.setup import auto_dtype, together

    team = launch.assemble(comm, 1)
    team.pin()
    load = lambda: load_split(directory, dtype=dtype or auto_dtype(directory)) if team.lead else None  # noqa: E731
    calibration = Calibration(team, together(team, load), directory, kv_dtype)
    for _ in range(passes):
        calibration.measure()
    return calibration.profile() if team.lead else None


def _loads(several: bool) -> list[Load]:
    """several: whether S and R are ranks of their own."""
    loads = [Load(batch, 1, _SHORT, _STEPS) for batch in _BATCHES]
    loads += [
        Load(2 * _BESIDE, 1, 4 * _SHORT, _STEPS),
        Load(_BESIDE // 2, 1, _LONG, _STEPS),
        Load(_BESIDE, 1, _LONG, _STEPS),
    ]
    loads += [Load(_BESIDE, 1, _SHORT, _STEPS, prompt=prompt, chunk=chunk) for prompt, chunk in _PROMPTS]
    return loads + [Load(2 * _BESIDE, 2, context, _STEPS) for context in _TWO_LANES if several]
