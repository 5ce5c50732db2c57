"""What an engine settles before it works, collective over the team: the model, and how its attention is spread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from hpcdecode.attention.base import LATENT_KV_DTYPES
from hpcdecode.attention.footprint import Footprint, largest
from hpcdecode.attention.open import by_kernels
from hpcdecode.attention.shapes import (
    MixerShape,
    attention_shapes,
    chooses_tokens,
    with_states_as,
)
from hpcdecode.attention.sizes import block_tokens_for, footprint_for, state_tokens_for
from hpcdecode.config import EngineOptions
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.engine.member_part import MemberPart
from hpcdecode.engine.weight_facts import auto_dtype, quantised
from hpcdecode.errors import UserError
from hpcdecode.exchange.partition import Partition
from hpcdecode.model import SplitModel, load_split
from hpcdecode.model.frontend.cache import cached_trace
from hpcdecode.model.run.load import CHOOSING_NEEDS, ModelPart, parse_dtype
from hpcdecode.model.run.split_model import AUTO
from hpcdecode.ranks.layout import Group
from hpcdecode.ranks.node_memory import node_memory, table_memory
from hpcdecode.ranks.roles import Rank
from hpcdecode.ranks.team import Team
from hpcdecode.requests.speculative import MTP
from hpcdecode.system.shared_memory import WeightMemory
from hpcdecode.system.torch_functions import settle_functions

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Setup(msgspec.Struct, frozen=True):
    """What the lead knows of the model and every rank needs.

    Attributes:
        shapes: Of every layer; in a group those of a member, which are the same for all of a stage.
        members: What each member of a group has.
        dtype: Of activations.
        kv_dtype: Of the KV cache.
        block_tokens: Tokens of a block of the KV cache.
        state_tokens: Tokens of the KV cache that a sequence's recurrent state counts as.
        max_positions: Most tokens of a sequence, or None.
        mapped_bytes: Of weights that may lie in the mapped files of the checkpoint, which the ranks of a host share.
        eos: Ids of the tokens that end a sequence.
    """

    shapes: list[MixerShape]
    members: list[MemberPart]
    dtype: str
    kv_dtype: str
    block_tokens: int
    state_tokens: int
    max_positions: int | None
    mapped_bytes: int
    eos: frozenset[int]

    def part_of(self, rank: Rank) -> MemberPart:
        """Return what a rank has of the model; of an R-rank, what the members have that it serves."""
        return self.members[rank.member]

    def shapes_of(self, rank: Rank) -> list[MixerShape]:
        """Return the shapes of a rank's layers."""
        return self.shapes[slice(*self.part_of(rank).layers)]

    def columns_of(self, rank: Rank) -> list[int]:
        """Return the number of logits that each member of a rank's stage computes; nothing if each computes all."""
        first = rank.member // rank.tp * rank.tp
        vocabularies = [part.vocabulary for part in self.members[first : first + rank.tp]]
        return [last - first for first, last in vocabularies] if vocabularies[-1][0] else []


def apart(team: Team, group: Group) -> bool:
    """Return whether q, k, v and o of a group cross in host memory; not if one rank does all on one device."""
    home = team.ranks[group.home]
    return not group.alone or home.device != home.kv_device


def direct(options: EngineOptions, team: Team, rank: Rank | None = None) -> bool:
    """Return whether a rank, this one by default, sends and receives in memory of its GPU; others may do so or not."""
    me = rank or team.me
    on_gpu = me.has_s != me.has_r and (me.kv_device if me.has_r else me.device) != "cpu"
    return options.gpu_mpi and options.exchange != "collective" and me.gpu_mpi and on_gpu


def partition_of(options: EngineOptions, pool: list[int]) -> Partition:
    """Return how the attention is spread over a pool of R-ranks."""
    return Partition(options.partition, len(pool))


def runs_indexers(options: EngineOptions, team: Team) -> bool:
    """Return whether R-ranks can attend to the tokens that indexers choose, and to compressed entries."""
    by_head = partition_of(options, team.pool).by_head
    return not by_head and options.route != "rotational" and options.schedule != "fluid"


def drops_windows(options: EngineOptions, rank: Rank, shapes: Sequence[MixerShape], kv_dtype: str) -> bool:
    """Return whether an R-rank's KV cache for these layers gives up what leaves windows.

    It does where all of it is in memory and kernels attend.
    """
    if options.schedule == "fluid" or not rank.has_r:
        return False
    return rank.kv_device == "cpu" or by_kernels(attention_shapes(shapes), kv_dtype, rank.kv_device)


def lookahead_of(options: EngineOptions) -> int:
    """Return the most tokens by which sequences are truncated again: those of a draft."""
    return options.speculative_config.num_speculative_tokens if options.speculative_config else 0


def footprint_of(options: EngineOptions, team: Team, group: Group, setup: Setup) -> Footprint:
    """Return what a sequence of a group takes of the KV cache of each of its R-ranks; the most of different ones."""
    found = []
    for pool in group.pools:
        shapes = list(map(partition_of(options, pool).shape, setup.shapes_of(team.ranks[pool[0]])))
        kinds = {(r.kv_windowed, r.kv_device != "cpu") for r in (team.ranks[place] for place in pool)}
        sizes = setup.kv_dtype, setup.block_tokens, setup.state_tokens
        ahead = lookahead_of(options)
        found += [footprint_for(shapes, *sizes, windowed, on_gpu, ahead) for windowed, on_gpu in sorted(kinds)]
    return largest(found)


class Loaded(NamedTuple):
    """What an S-rank has: the model with its weights, and its tokenizer."""

    model: SplitModel
    tokenizer: Tokenizer


def load(options: EngineOptions, team: Team, model: SplitModel | None = None) -> tuple[Setup, Loaded | None]:
    """Load the model and its tokenizer on the S-ranks.

    Args:
        options: of the engine.
        team: the ranks and their roles.
        model: one loaded before.

    Raises:
        UserError: of any rank, on every rank.
    """
    settle_functions()

    def own(memory: WeightMemory, tables: WeightMemory) -> Loaded | None:
        if not team.me.has_s:
            return None
        device = team.me.device
        if options.compile and device == "cpu":
            raise UserError(
                "--compile: expected S-ranks on GPUs, got cpu, where slices are compiled in any case; leave it out"
            )
        assert model is None or team.me.parts == 1, "a model that is given is whole: expected no members"
        tokenizer = Tokenizer.load(options.model, skip=options.skip_tokenizer_init)
        parsers = tokenizer.parse_output(options.reasoning_parser, options.tool_call_parser)
        if team.lead and AUTO in (options.reasoning_parser, options.tool_call_parser):
            logger.info("reasoning parser {}, tool-call parser {}".format(*parsers))
        dtype = options.dtype or auto_dtype(options.model, device)
        loaded = model or load_split(
            options.model,
            dtype=dtype,
            device=device,
            quantised=quantised(options, dtype, device),
            inductor=options.compile,
            graphs=not options.enforce_eager,
            announce=team.lead,
            lora=options.lora,
            adapters=options.adapters,
            memory=memory,
            tables=tables,
            part=ModelPart(team.me.tp, team.me.tp_rank, team.me.pp, team.me.pp_rank, options.ep),
            indexers=runs_indexers(options, team),
            int8_activations=options.activations == "int8",
            hidden=options.speculative_config is not None and options.speculative_config.method == MTP,
        )
        check_kv_dtype(options.kv_dtype, loaded.attends)
        if model is not None and not runs_indexers(options, team):
            require_all_tokens(loaded.attends)
        partition_of(options, team.pool).check(loaded.attends)
        return Loaded(loaded, tokenizer)

    _trace_once(options, team, loaded=model is not None)
    loads = team.me.has_s and model is None
    with node_memory(team, loads=loads) as memory, table_memory(team, loads=loads) as tables:
        loaded = together(team, lambda: own(memory, tables))
    parts = team.gather_all([MemberPart.of(loaded.model)] if loaded else [], list[MemberPart])
    first = [part for place in team.groups[0].members for part in parts[place]]
    setup = _describe(options, loaded, first) if team.lead and loaded else None
    return team.broadcast(setup, Setup), loaded


def check_kv_dtype(kv_dtype: str | None, shapes: Sequence[MixerShape]) -> None:
    """Raise UserError if K and V are to be kept as two data types, but the values lie in K."""
    if kv_dtype not in (None, *LATENT_KV_DTYPES) and any(shape.latent for shape in attention_shapes(shapes)):
        raise UserError(
            f"--kv-dtype {kv_dtype}: expected one of {', '.join(LATENT_KV_DTYPES)} for a model whose attention runs "
            "over latents, which hold K and V at once; int8 is the smallest"
        )


def require_all_tokens(shapes: Sequence[MixerShape]) -> None:
    """Raise UserError if a model that was loaded for other ranks has layers that attend to chosen tokens or entries."""
    if chooses_tokens(shapes):
        raise UserError(f"the model was loaded with indexers or compressed entries: expected {CHOOSING_NEEDS}")


def _trace_once(options: EngineOptions, team: Team, *, loaded: bool) -> None:
    """Let the first S-rank of a host trace the model, so that the others find the trace in the cache.

    Every rank calls this, those with a model loaded before, too.
    """
    s_ranks = [team.ranks[place] for place in team.s_ranks]
    by_host = {host: [r for r in s_ranks if r.host == host] for host in {r.host for r in s_ranks}}
    if max(map(len, by_host.values())) == 1:
        return
    if not loaded and team.me.rank in {ranks[0].rank for ranks in by_host.values()}:
        with suppress(UserError):  # `load_split` tells of it with what the checkpoint lacks
            dtype = options.dtype or auto_dtype(options.model, team.me.device)
            cached_trace(Path(options.model), parse_dtype(dtype, options.model), team.lead)
    team.gather_all(0, int)


def together(team: Team, action: Callable[[], T]) -> T:
    """Return what `action` returns on this rank; raise the UserError of any rank on every rank.

    One of the lead comes first, since it speaks for all; that of another rank is told with its name.
    """
    results, problem = [], ""
    try:
        results.append(action())
    except UserError as error:
        problem = str(error)
    problems = team.gather_all(problem, str)
    if own := problems[team.s_ranks[0]]:
        raise UserError(own, everywhere=True)
    for rank, told in zip(team.ranks, problems, strict=True):
        if told:
            raise UserError(f"rank {rank.rank} on {rank.host}: {told}", everywhere=True)
    return results[0]


def _describe(options: EngineOptions, loaded: Loaded, members: Sequence[MemberPart]) -> Setup:
    model = loaded.model
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = options.kv_dtype or dtype
    shapes = with_states_as(model.attends, options.mamba_ssm_cache_dtype or "float32", lookahead_of(options))
    for i, bias in (item for part in members for item in part.biases.items()):
        shapes[i] = msgspec.structs.replace(shapes[i], bias=bias)
    block_tokens = block_tokens_for(shapes, kv_dtype)
    stages = [shapes[slice(*part.layers)] for part in members]
    return Setup(
        shapes=shapes,
        members=list(members),
        dtype=dtype,
        kv_dtype=kv_dtype,
        block_tokens=block_tokens,
        state_tokens=max(state_tokens_for(stage, kv_dtype, block_tokens) for stage in stages),
        max_positions=model.max_positions,
        mapped_bytes=model.mapped_bytes,
        eos=loaded.tokenizer.eos_token_ids,
    )
