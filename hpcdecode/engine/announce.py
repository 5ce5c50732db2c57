"""Messages of the lead at the start of a job: topology, values that were given or chosen, and the time it took."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import groupby

from hpcdecode.attention.shapes import attention_shapes, recurrent_shapes, state_bytes
from hpcdecode.config import QUANTISED, EngineOptions
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.fluid import rotation_of
from hpcdecode.engine.member_part import MemberPart
from hpcdecode.engine.scale import Scale
from hpcdecode.engine.setup import Setup
from hpcdecode.model.frontend.config import stated_dtype
from hpcdecode.report import text
from hpcdecode.report.stages import Stages
from hpcdecode.report.text import span
from hpcdecode.requests.prompt import Prompt
from hpcdecode.schedule.auto import mean_prompt

_CHOSEN = ("dtype", "kv_dtype", "batch", "period", "lanes", "prefill_tokens", "kv_memory")  # unless they are given
logger = logging.getLogger(__name__)


def announce(engine: Engine, scales: Sequence[Scale], stages: Stages) -> None:
    """Log the topology, the values that were given or chosen, and the time of the start."""
    setup = engine.setup
    weights = f" with {engine.options.weights} weights" if engine.options.weights in QUANTISED else ""
    weights += " by int8 activations" if engine.options.activations == "int8" else ""
    logger.info(text.topology(engine.team.ranks))
    logger.info(f"layout: {engine.team.layout}")
    if engine.team.ranks[engine.team.s_ranks[0]].parts > 1:
        logger.info(_members(setup))
    if engine.options.ep:
        _say_experts(engine.team.ranks[engine.team.s_ranks[0]].tp, setup.members)
    model = f"{engine.options.model}: {_layers(setup)}, {setup.dtype}{weights}, KV {setup.kv_dtype}; "
    for scale, alike in groupby(scales):
        count = len(list(alike))
        each = f"each of {count} S-ranks: " * (count > 1)
        logger.info(model + each + _sizes(engine.options, scale))
    if rotation := rotation_of(engine.team):
        logger.info(rotation.text())
    logger.info(stages.text())


def _layers(setup: Setup) -> str:
    """Return how many layers attend and keep states, and what a state takes."""
    attend, keep = len(attention_shapes(setup.shapes)), len(recurrent_shapes(setup.shapes))
    if not keep:
        return f"{attend} layers"
    size, kept = state_bytes(setup.shapes) / (1 << 20), recurrent_shapes(setup.shapes)[0].state_dtype
    return f"{attend} layers with attention and {keep} with states ({size:,.2f} MiB a sequence in {kept})"


def _members(setup: Setup) -> str:
    """Return what the members of a group have, as a line."""
    stages = list(dict.fromkeys(member.layers for member in reversed(setup.members)))
    first = setup.members[0]
    layers = ", ".join(f"{begin}-{end - 1}" for begin, end in stages)
    stated = f"layers {layers}" if len(stages) > 1 else f"{first.sums} sums a step"
    if first.share == 1:
        return f"members: each holds {stated}"
    counts = {
        "KV heads": {shape.kv_heads for shape in attention_shapes(setup.shapes)},
        "heads of states": {shape.heads for shape in recurrent_shapes(setup.shapes) if shape.k_dim},
        "channels of convolutions": {shape.heads for shape in recurrent_shapes(setup.shapes) if not shape.k_dim},
    }
    heads = ", ".join(f"{name} {span(sorted(each))}" for name, each in counts.items() if each)
    shares = sorted(f"{member.share:.2f}" for member in setup.members)
    share = " .. ".join(dict.fromkeys((shares[0], shares[-1])))
    copied = sum({member.layers: member.copied for member in setup.members}.values())
    whole = f"; {copied} of {len(setup.shapes)} layers have all heads on each member" if copied else ""
    return f"members: each holds {share} of the projections' weights, {heads}; {stated}{whole}"


def _say_experts(tp: int, members: Sequence[MemberPart]) -> None:
    """Log who has the experts of an MoE model with --ep, and what of them is sent."""
    if tp > 1:
        own_rows = {(m.layers, m.sums): m.sums_of_own_rows for m in members}
        sent = f"in {sum(own_rows.values())} of {sum(sums for _, sums in own_rows)} sums a step a rank sends"
        logger.info(f"experts: each whole on one of {tp} ranks; {sent} the rows of its own experts alone")
    else:
        logger.warning("--ep has no effect: the experts are on one rank; give --tp 2 or more ranks to deal them out")


def _sizes(options: EngineOptions, scale: Scale) -> str:
    limit = f" up to {scale.load:,} tokens a step" if options.schedule == "load-control" else ""
    grows = f" up to {scale.most}" if scale.growth > 1 else ""
    admission = "" if options.admission == "reserve" else f", admission {options.admission}"
    return (
        f"batch {scale.batch}{grows}, period {scale.period} of {scale.steps} steps, lanes {len(scale.lanes)}, "
        f"up to {scale.prefill_tokens:,} prompt tokens a step, schedule {options.schedule}{limit}{admission}"
    )


def explain(engine: Engine, scales: Sequence[Scale], first: Sequence[Prompt], all_rows: bool) -> None:
    """Log, at level DEBUG, from what the values were chosen; warn if rows choose none of the adapters that there are.

    Args:
        engine: The engine.
        scales: What was chosen, by group.
        first: First rows of the job.
        all_rows: Whether these are all rows.
    """
    options, team = engine.options, engine.team
    if options.adapters and all_rows and first and all(prompt.adapter < 0 for prompt in first):
        logger.warning(
            f"hpcdecode: warning: no row that is left chooses an adapter, of {', '.join(options.adapters)}: the model "
            "alone answers them; rows choose by their field lora, and --lora DIR without a name is for all rows"
        )
    if not logger.isEnabledFor(logging.DEBUG):
        return
    given = [name for name in _CHOSEN if getattr(options, name) is not None]
    r_ranks = [r for r in team.ranks if r.has_r]
    logger.debug(f"hpcdecode: given by flags or profile, of {', '.join(_CHOSEN)}: {', '.join(given) or 'none'}")
    logger.debug(f"hpcdecode: the checkpoint states {stated_dtype(options.model)}, S-ranks use {team.me.device}")
    logger.debug(f"hpcdecode: R-ranks: {len(r_ranks)}, which hold {sum(r.kv_tokens for r in r_ranks):,} KV tokens")
    logger.debug(
        f"hpcdecode: {'all' if all_rows else 'first'} {len(first)} rows: {mean_prompt(first):,.1f} prompt tokens on "
        f"average, at most {scales[0].steps} decode steps, level load {sum(s.load for s in scales):,} tokens"
    )
