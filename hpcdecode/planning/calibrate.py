"""What a model costs on this machine: lanes in their steady state, on the ranks that a job would run on."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from hpcdecode.attention.recurrent_shapes import RecurrentShape
from hpcdecode.attention.shapes import LayerShape, attention_shapes, recurrent_shapes, with_states_as
from hpcdecode.attention.sizes import bytes_per_token
from hpcdecode.config import EngineOptions
from hpcdecode.engine import setup
from hpcdecode.engine.weight_facts import weight_facts
from hpcdecode.model import SplitModel
from hpcdecode.model.frontend.architectures import text_of
from hpcdecode.model.frontend.config import read_config
from hpcdecode.planning.cost import Cost
from hpcdecode.planning.fit import Sample, chosen_at_rate, fit, window_shares
from hpcdecode.planning.group_probe import measure_replicas, split_ratio
from hpcdecode.planning.kv_unit import KvUnit
from hpcdecode.planning.profile import MemberCosts, Profile
from hpcdecode.planning.steady import Steady
from hpcdecode.planning.steady_load import OperationSeconds, SteadyLoad
from hpcdecode.planning.sum_probe import measure_sums, member_counts
from hpcdecode.ranks.layout import against_replicas
from hpcdecode.ranks.team import Team, assemble
from hpcdecode.report.benchmark import machine

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger(__name__)
_BATCHES = (4, 16, 32, 64, 128, 256)  # of a lane
_SHORT = 64  # tokens of context
_ATTENDED = ((32, 64), (128, 64), (64, 256), (16, 1024))  # sequences, tokens of context
_BESIDE = 32  # sequences of a lane beside prompts
_PROMPTS = ((160, 32), (640, 128), (512, 512))  # tokens, and of them in a step: all of _STEPS + 1
_AT_ONCE = ((64, 256), (32, 1024))  # sequences of two lanes, and contexts at which both sides have work
_STEPS = 4
_GROUP_LOADS = (
    *(SteadyLoad(batch, 1, _SHORT, _STEPS) for batch in (4, 16, 64, 256)),
    *(SteadyLoad(_BESIDE, 1, _SHORT, _STEPS, prompt=prompt, chunk=chunk) for prompt, chunk in _PROMPTS[1:]),
    SteadyLoad(64, 1, 256, _STEPS),
)
_KV_BYTES = 1 << 30  # of an R-rank at most


class Calibration:
    """Measures a model on the ranks of a team: on one S-rank and its R-ranks, and on every rank as a replica.

    Replicas are measured all at once, since they share the memory's bandwidth. One process is both. Every rank calls
    the same methods.

    Args:
        team: The ranks, of which one is the S-rank.
        model: On the S-rank; on every rank if replicas are to be measured as well; else None.
        directory: Of the model.
        kv_dtype: Data type of the KV cache; None for that of the model.
        state_dtype: Data type of recurrent states, one of STATE_DTYPES.
        loads: To be measured; None for those that suit any job.

    Attributes:
        samples: What was measured of the split so far.
        replica_samples: What was measured of replicas so far, the mean over them.
        sums: What groups of several members cost.
    """

    def __init__(
        self,
        team: Team,
        model: SplitModel | None,
        directory: str,
        kv_dtype: str | None,
        state_dtype: str = "float32",
        loads: Sequence[SteadyLoad] | None = None,
    ):
        torch.set_num_threads(team.me.threads)
        attends = with_states_as(model.attends, state_dtype) if model else None
        shapes = team.broadcast(attends, list[LayerShape | RecurrentShape])
        self.team, self.directory = team, directory
        self._steady = Steady(team, shapes, model if team.me.has_s else None, kv_dtype)
        self._loads = list(loads) if loads else self._fitting(_loads(team.comm is not None), len(team.r_ranks))
        self._replica: Steady | None = None
        self._replica_loads: list[SteadyLoad] = []
        if team.comm is not None and all(team.gather_all(model is not None, bool)):
            alone = Team(None, [msgspec.structs.replace(team.me, role="SR")])
            self._replica = Steady(alone, shapes, model, kv_dtype, beside=team)
            self._replica_loads = self._fitting(_loads(False), 1)
        self.samples: list[Sample] = []
        self.replica_samples: list[Sample] = []
        self.sums: list[MemberCosts] = []
        self._indexes = any(shape.indexer for shape in attention_shapes(shapes))
        self._paged: dict[int, list[float]] = defaultdict(list)  # seconds that pages add to a step, by sequences
        for load in self._loads:  # products have their kernels made, and are not counted
            self._steady.run(replace(load, steps=2))
        for load in self._replica_loads:
            self._run_replicas(replace(load, steps=2))

    def measure(self) -> None:
        """Measure all loads once."""
        for load in self._loads:
            self.samples.append(Sample(load, self._steady.run(load)))
            if self.team.comm is None and self._may_page(load):
                self._note_paged(load, self.samples[-1], self._steady.run(replace(load, paged=True))[0])
        for load in self._replica_loads:
            self.replica_samples.append(Sample(load, [self._run_replicas(load)]))
            if self._may_page(load):
                self._note_paged(load, self.replica_samples[-1], self._run_replicas(replace(load, paged=True)))

    def _may_page(self, load: SteadyLoad) -> bool:
        """Return whether a load is measured with a KV cache of pages, too: of those that decode."""
        return not load.prompt and not recurrent_shapes(self._steady.shapes) and not self._indexes

    def _note_paged(self, load: SteadyLoad, sample: Sample, paged: OperationSeconds) -> None:
        self._paged[load.batch].append(paged["step"] - sample.ranks[0]["step"])

    def measure_sums(self, comm: MPI.Intracomm) -> None:
        """Measure the sums of members, for each number of members that model and ranks allow."""
        found = text_of(read_config(self.directory)).hidden_size if self.team.lead else 0
        columns, dtype = self.team.broadcast(found, int), getattr(torch, self._steady.dtype)
        counts = member_counts(comm.size, self._steady.shapes)
        self.sums = measure_sums(comm, columns, dtype, counts)

    def measure_groups(self, comm: MPI.Intracomm, options: EngineOptions, passes: int) -> None:
        """Measure groups of members whose sums were measured, alone and beside R-ranks; each member loads its part."""
        loads = self._fitting(_GROUP_LOADS, 1)
        for i, each in enumerate(self.sums):
            if samples := measure_replicas(comm, options, each.members, loads, passes):
                each = self.sums[i] = msgspec.structs.replace(each, replica=self._fitted(samples, alone=False))
            profile = self.profile()
            member = profile.of_member(profile.cost, each.members)
            if ratio := split_ratio(comm, options, each.members, member, passes):
                self.sums[i] = msgspec.structs.replace(each, split=ratio)

    def profile(self) -> Profile:
        """Return the profile by the passes so far; it is the same on every rank."""
        steady = self._steady
        return Profile(
            machine=machine(),
            model=self.directory,
            dtype=steady.dtype,
            kv_dtype=steady.kv_dtype,
            ranks=len(self.team.ranks),
            cost=self._fitted(self.samples, alone=self.team.comm is None),
            spread={**_spread(self.samples, ""), **_spread(self.replica_samples, "replicas: ")},
            replica=self._fitted(self.replica_samples, alone=True) if self.replica_samples else None,
            token_bytes=bytes_per_token(steady.shapes, steady.kv_dtype),
            sums=self.sums,
            shapes=steady.shapes,
        )

    def _fitted(self, samples: Sequence[Sample], alone: bool) -> Cost:
        """Return the cost that comes nearest to samples, of ranks of both roles or of a split."""
        shapes = self._steady.shapes
        kinds = bool(attention_shapes(shapes)), bool(recurrent_shapes(shapes))
        windows = window_shares(shapes)
        cost = fit(samples, len(shapes), attends=kinds[0], keeps_states=kinds[1], windows=windows)
        paged = sorted(self._paged.items()) if alone else []
        return msgspec.structs.replace(
            cost,
            chosen=chosen_at_rate(cost, shapes, self._steady.kv_dtype),
            paged_tokens=[batch for batch, _ in paged],
            paged_seconds_at=[max(median(added), 0.0) for _, added in paged],
        )

    def _run_replicas(self, load: SteadyLoad) -> OperationSeconds:
        """Return the seconds of a replica's step by operation, the mean over all of them."""
        assert self._replica is not None, "replicas: expected a model on every rank"
        every = self.team.gather_all(self._replica.run(load)[0], dict[str, float])
        return {o: fmean(own.get(o, 0.0) for own in every) for o in {o for own in every for o in own}}

    def _fitting(self, loads: Iterable[SteadyLoad], r_ranks: int) -> list[SteadyLoad]:
        """Return the loads whose KV cache fits."""
        unit = KvUnit.of(self._steady.shapes, self._steady.kv_dtype)
        capacity = unit.capacity(_KV_BYTES) * r_ranks
        return [load for load in loads if load.batch * unit.held(load.context) <= capacity]


def _spread(samples: Sequence[Sample], kind: str) -> dict[str, tuple[float, float]]:
    """Return the quartiles of the passes' steps over their median, by a name of the load that begins with `kind`."""
    steps: dict[str, list[float]] = defaultdict(list)
    for load, ranks in samples:
        prompts = f", {load.chunk} of prompts of {load.prompt}" if load.prompt else ""
        steps[f"{kind}{load.lanes} x {load.lane_batch} at {load.context}{prompts}"].append(ranks[0]["step"])
    quartiles = {name: np.quantile(own, [0.25, 0.75]) / median(own) for name, own in steps.items()}
    return {name: (round(float(low), 3), round(float(high), 3)) for name, (low, high) in quartiles.items()}


def calibrate(
    comm: MPI.Intracomm | None,
    directory: str,
    dtype: str | None,
    kv_dtype: str | None,
    passes: int,
    state_dtype: str = "float32",
) -> Profile | None:
    """Measure a model; return its profile on the S-rank, None on R-ranks.

    Replicas are measured where the weights fit on every rank.

    Args:
        comm: The ranks; None for one process.
        directory: Of the model.
        dtype: Data type of weights and activations; None chooses as jobs do.
        kv_dtype: Data type of the KV cache; None for that of the model.
        passes: How often every load is measured.
        state_dtype: Data type of recurrent states, one of STATE_DTYPES.

    Raises:
        UserError: If the model cannot be loaded.
    """
    options = EngineOptions(model=directory, dtype=dtype)
    team = assemble(comm, weights=weight_facts(options))
    team.pin()
    why_not = against_replicas(team.ranks) or (None if all(r.weights for r in team.ranks) else "no weights on a rank")
    holders = team
    if comm is not None and why_not is None:
        holders = Team(comm, [msgspec.structs.replace(rank, role="SR") for rank in team.ranks])
    elif comm is not None and team.lead:
        logger.warning(f"replicas are not measured: {why_not}")
    loaded = setup.load(options, holders)[1]
    calibration = Calibration(team, loaded and loaded.model, directory, kv_dtype, state_dtype)
    for _ in range(passes):
        calibration.measure()
    if comm is not None:
        calibration.measure_sums(comm)
        own = msgspec.structs.replace(options, kv_dtype=kv_dtype, mamba_ssm_cache_dtype=state_dtype)
        calibration.measure_groups(comm, own, passes)
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
