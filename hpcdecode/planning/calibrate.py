"""What a model costs on this machine: lanes in their steady state, on the ranks that a job would run on."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import torch

from hpcdecode.attention.base import LayerShape, bytes_per_token
from hpcdecode.model import SplitModel, load_split
from hpcdecode.planning.fit import Sample, fit
from hpcdecode.planning.profile import Profile
from hpcdecode.planning.steady import Steady
from hpcdecode.planning.steady_load import SteadyLoad
from hpcdecode.ranks.team import Team, assemble
from hpcdecode.report.benchmark import machine

if TYPE_CHECKING:
    from mpi4py import MPI

_BATCHES = (4, 16, 32, 64, 128, 256)  # of a lane
_SHORT = 64  # tokens of context
_ATTENDED = ((32, 64), (128, 64), (64, 256), (16, 1024))  # sequences, tokens of context
_BESIDE = 32  # sequences of a lane beside prompts
_PROMPTS = ((160, 32), (640, 128), (512, 512))  # tokens, and of them in a step: all of _STEPS + 1
_AT_ONCE = ((64, 256), (32, 1024))  # sequences of two lanes, and contexts at which both sides have work
_STEPS = 4
_KV_BYTES = 1 << 30  # of an R-rank at most


class Calibration:
    """Measures a model on one S-rank and the R-ranks of a team, or on one process that is both.

    Every rank calls the same methods.

    Args:
        team: The ranks.
        model: On the S-rank, else None.
        directory: Of the model.
        kv_dtype: Data type of the KV cache; None for that of the model.

    Attributes:
        steady: Runs the loads.
        loads: What is measured in every pass.
        samples: What was measured so far.
    """

    def __init__(self, team: Team, model: SplitModel | None, directory: str, kv_dtype: str | None):
        torch.set_num_threads(team.me.threads)
        shapes = team.broadcast(list(model.attends) if model else None, list[LayerShape])
        self.team, self.directory = team, directory
        self.steady = Steady(team, shapes, model, kv_dtype)
        width = bytes_per_token(shapes, self.steady.kv_dtype)
        capacity = int(_KV_BYTES / width) * len(team.r_ranks)
        self.loads = [load for load in _loads(team.comm is not None) if load.batch * load.context <= capacity]
        self.samples: list[Sample] = []
        for load in self.loads:  # products have their kernels made, and are not counted
            self.steady.run(replace(load, steps=2))

    def measure(self) -> None:
        """Measure all loads once."""
        self.samples += [Sample(load, self.steady.run(load)) for load in self.loads]

    def profile(self) -> Profile:
        """Return the profile by the passes so far; it is the same on every rank."""
        steady = self.steady
        cost = fit(self.samples, len(steady.shapes))
        size = len(self.team.ranks)
        return Profile(machine(), self.directory, steady.dtype, steady.kv_dtype, size, cost, self._spread())

    def _spread(self) -> dict[str, tuple[float, float]]:
        """Return the quartiles of the passes' steps over their median, by a name of the load."""
        steps: dict[str, list[float]] = defaultdict(list)
        for load, ranks in self.samples:
            prompts = f", {load.chunk} of prompts of {load.prompt}" if load.prompt else ""
            steps[f"{load.lanes} x {load.lane_batch} at {load.context}{prompts}"].append(ranks[0]["step"])
        quartiles = {name: np.quantile(own, [0.25, 0.75]) / median(own) for name, own in steps.items()}
        return {name: (round(float(low), 3), round(float(high), 3)) for name, (low, high) in quartiles.items()}


def calibrate(
    comm: MPI.Intracomm | None, directory: str, dtype: str | None, kv_dtype: str | None, passes: int
) -> Profile | None:
    """Measure a model; return its profile on the S-rank, None on R-ranks.

    Args:
        comm: The ranks; None for one process.
        directory: Of the model.
        dtype: Data type of weights and activations; None chooses as jobs do.
        kv_dtype: Data type of the KV cache; None for that of the model.
        passes: How often every load is measured.

    Raises:
        UserError: If the model cannot be loaded.
    """
    from hpcdecode.engine.setup import auto_dtype, together

    team = assemble(comm)
    team.pin()
    load = lambda: load_split(directory, dtype=dtype or auto_dtype(directory)) if team.lead else None  # noqa: E731
    calibration = Calibration(team, together(team, load), directory, kv_dtype)
    for _ in range(passes):
        calibration.measure()
    return calibration.profile() if team.lead else None


def _loads(several: bool) -> list[SteadyLoad]:
    """Return what is measured.

    Args:
        several: Whether S and R are ranks of their own, and jobs have two lanes.
    """
    lanes = 2 if several else 1
    loads = [SteadyLoad(lanes * batch, lanes, _SHORT, _STEPS) for batch in _BATCHES]
    loads += [SteadyLoad(lanes * _BESIDE, lanes, _SHORT, _STEPS, prompt=p, chunk=chunk) for p, chunk in _PROMPTS]
    loads += [SteadyLoad(batch, 1, context, _STEPS) for batch, context in _ATTENDED]
    loads += [SteadyLoad(batch, 2, context, _STEPS) for batch, context in _AT_ONCE if several]
    return list(dict.fromkeys(loads))
