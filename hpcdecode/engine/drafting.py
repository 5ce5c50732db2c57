"""What an engine guesses tokens with: what was generated before, or a second model that its S-ranks have beside."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from hpcdecode.attention.open import device_capacity, open_kv_cache, open_on_device
from hpcdecode.attention.shapes import attention_shapes
from hpcdecode.attention.sizes import block_tokens_for, capacity_for
from hpcdecode.config import EngineOptions
from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.data.prompts.vocabulary import load_backend
from hpcdecode.engine.draft_model import DraftModel
from hpcdecode.engine.room import draft_bytes
from hpcdecode.engine.setup import Loaded, Setup, check_kv_dtype, together
from hpcdecode.engine.weight_facts import auto_dtype, quantised
from hpcdecode.errors import UserError
from hpcdecode.model import SplitModel, load_split
from hpcdecode.model.frontend.gguf.folder import model_folder
from hpcdecode.ranks.node_memory import node_memory
from hpcdecode.ranks.team import Team
from hpcdecode.requests.speculative import LOOKUPS, MTP, SpeculativeConfig
from hpcdecode.schedule.model_drafts import ModelDrafts
from hpcdecode.schedule.placement import Placement
from hpcdecode.schedule.speculation import Speculation, drafter_of
from hpcdecode.system.model_path import find_model
from hpcdecode.system.shared_memory import WeightMemory
from hpcdecode.system.timeline import Timeline

logger = logging.getLogger(__name__)
_LIKE = 0.99  # of the second model's tokens that have the same ids in the first: others are chat marks and the like


class Drafting:
    """Opens what the S-rank of this process guesses with; collective over the team.

    Args:
        options: Of the engine.
        team: Of this rank.
        loaded: The model; None on ranks without weights.
        timeline: Of this rank.

    Raises:
        UserError: If there is no second model where one was named, or it cannot go on with the first; on every rank.
    """

    def __init__(self, options: EngineOptions, team: Team, loaded: Loaded | None, timeline: Timeline):
        self._options, self._team, self._loaded, self._timeline = options, team, loaded, timeline
        self._drafter = drafter_of(options.speculative_config)
        self._model = _load(options, team, loaded)
        self._drafts: ModelDrafts | None = None  # kept from run to run, with what it has learnt
        self._slots = 0  # that it has

    def speculation(self, setup: Setup, placement: Placement, slots: int) -> Speculation:
        """Return what guesses for the lanes of this S-rank.

        Args:
            setup: Of the model.
            placement: Of the S-rank.
            slots: Sequences at once, of all lanes.
        """
        config = self._options.speculative_config
        if self._drafts is not None and slots <= self._slots:
            self._drafts.model.forget_all()
        elif config and self._model is not None:
            self._drafts = None  # its memory goes first
            model = self._opened(config, self._model, setup, sum(placement.capacity), slots)
            self._drafts, self._slots = ModelDrafts(model, config.num_speculative_tokens), slots
        return Speculation(config, placement, self._drafter, self._drafts)

    def _opened(
        self, config: SpeculativeConfig, model: SplitModel, setup: Setup, tokens: int, slots: int
    ) -> DraftModel:
        """Open the second model's KV cache, for no more tokens than R-ranks have room for, and what goes on with it."""
        assert self._loaded is not None, "expected an S-rank"
        shapes, dtype = attention_shapes(model.attends), setup.kv_dtype
        nbytes, block = draft_bytes(self._options, self._team, setup), block_tokens_for(shapes, dtype)
        on_cpu = model.device.type == "cpu"
        room = (
            capacity_for(shapes, dtype, nbytes, block)
            if on_cpu
            else device_capacity(shapes, dtype, nbytes, block, 0, model.device)
        )
        capacity = max(min(room, tokens + slots * block), block)
        if on_cpu:
            kv_cache = open_kv_cache(
                shapes,
                kv_dtype=dtype,
                capacity_tokens=capacity,
                max_sequences=slots,
                block_tokens=block,
                threads=self._team.me.threads,
                team=True,
            )
        else:
            kv_cache = open_on_device(
                shapes,
                (),
                kv_dtype=dtype,
                capacity_tokens=capacity,
                max_sequences=slots,
                block_tokens=block,
                state_tokens=0,
                device=model.device,
            )
        return DraftModel(model, kv_cache, slots, self._loaded.model.vocab_size, self._timeline, config.max_model_len)


def _load(options: EngineOptions, team: Team, loaded: Loaded | None) -> SplitModel | None:
    """Return the second model on this S-rank, if there is one and the rank is the first of its group."""
    config = options.speculative_config
    if config is None or config.method in LOOKUPS:
        return None
    loads, mtp = loaded is not None and team.place in team.homes, config.method == MTP

    def own(memory: WeightMemory) -> SplitModel | None:
        if not loads or loaded is None:
            return None
        path = options.model if mtp else find_model(config.model or "", {})
        device, graphs = team.me.device, not options.enforce_eager
        try:
            dtype = options.dtype or auto_dtype(path, device)
            weights = config.quantization or (options.weights if mtp else None)
            form = quantised(msgspec.structs.replace(options, model=path, weights=weights), dtype, device)
            model = load_split(
                path,
                dtype=dtype,
                device=device,
                quantised=form,
                memory=memory,
                graphs=graphs,
                indexers=not mtp,
                mtp=mtp,
                hidden=mtp,
                like=loaded.model if _same_files(path, options.model) else None,
            )
            _require_attention(model)
            check_kv_dtype(options.kv_dtype, model.attends)
            if team.lead:
                _require_same_tokens(options, loaded.tokenizer, path)
                of = "its layer for multi-token prediction" if mtp else f"{len(model.attends)} layers"
                logger.info(f"{path} guesses tokens ahead: {of}, {weights or dtype}")
        except UserError as error:
            raise UserError(f"--speculative-config: model {config.model or path!r}: {error}") from error
        return model

    with node_memory(team, loads=loads) as memory:
        return together(team, lambda: own(memory))


def _same_files(path: str, other: str) -> bool:
    return Path(path).resolve() == Path(other).resolve()


def _require_attention(model: SplitModel) -> None:
    """Raise UserError if a layer keeps a recurrent state, which cannot go back to before a guess."""
    if len(attention_shapes(model.attends)) < len(model.attends):
        raise UserError(
            f"expected layers that all attend, got {model.facts.model_type}, some of which keep recurrent states; "
            "name another model"
        )


def _require_same_tokens(options: EngineOptions, tokenizer: Tokenizer, path: str) -> None:
    """Raise UserError if tokens of the model at `path` have other ids in a tokenizer."""
    if options.skip_tokenizer_init or _same_files(path, options.model):
        return
    first, second = tokenizer.backend.get_vocab(), load_backend(model_folder(path)).get_vocab()
    unlike = [token for token, number in second.items() if first.get(token) != number]
    if len(unlike) > (1 - _LIKE) * len(second):
        token = unlike[0]
        raise UserError(
            f"expected a model with the tokens of {options.model}, got others: {len(unlike):,} of {len(second):,} "
            f"have other ids there, as {token!r}, {second[token]} and {first.get(token)}; name one of the same family"
        )
