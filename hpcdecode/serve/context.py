"""What the routes of the server share."""

from __future__ import annotations

import time
from pathlib import Path

from hpcdecode.data.prompts.batch_format import is_named, model_names
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.live import Event, LiveDesk
from hpcdecode.engine.scale import capacity_of
from hpcdecode.requests.params import SamplingParams
from hpcdecode.serve.batch.about import about_of, attributes_of
from hpcdecode.serve.batch.service import BatchService
from hpcdecode.serve.files.folder import data_folder
from hpcdecode.serve.hub import Hub
from hpcdecode.serve.options import ServeOptions

STALL_SECONDS = 120.0  # after which a reader of a stream that takes nothing is given up
_HUB_FOLDER = "models--"  # begin of the name of a model's folder in the cache of the Hugging Face hub


class Context:
    """What the routes of the server share.

    Args:
        engine: The model, loaded.
        options: Of the server.

    Attributes:
        options: Of the server.
        hub: Brings rows to the desk, and hands out what happens to them.
        desk: Where rows go; there is none before `open`, nor are there the next ones.
        batches: Files and batches.
        tokenizer: Of the model.
        models: Names of the model; the first is shown in answers.
        adapters: Names of its adapters, which requests may name in its place.
        max_model_len: Positions of the model.
        kv_capacity: Tokens that all KV caches have room for.
        defaults: Sampling parameters that the fields of requests replace, but for max_tokens.
        timeline: Of this rank.
        created: Unix time of the server's start.
        stall_seconds: After which a reader of a stream that takes nothing is given up.
    """

    desk: LiveDesk
    batches: BatchService

    def __init__(self, engine: Engine, options: ServeOptions) -> None:
        self.options, self.hub = options, Hub()
        self.tokenizer, self.max_model_len = engine.tokenizer, engine.max_positions
        self.models = options.served_model_name or (model_name(options.model),)
        self.adapters = tuple(options.adapters)
        self.kv_capacity = sum(sum(capacity_of(engine.options, engine.team, group)) for group in engine.team.groups)
        self.defaults = SamplingParams()
        self.timeline = engine.timeline
        self.created = int(time.time())
        self.stall_seconds = STALL_SECONDS
        self._engine = engine

    def deliver(self, events: list[Event]) -> None:
        """Pass on what happens to rows, in any thread; a desk is made with it."""
        self.hub.deliver(self.batches.deliver(events))

    def open(self, desk: LiveDesk) -> None:
        """Bring rows to a desk from now on.

        Raises:
            UserError: The folder of files and batches cannot be used.
        """
        self.desk, options = desk, self.options
        self.batches = BatchService(
            data_folder(options.data_dir, options.port),
            desk,
            api_keys=options.api_keys,
            about=about_of(self._engine),
            attributes=attributes_of(self._engine),
            models=self.models,
            most_file_bytes=options.max_file,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the model and of its adapters."""
        return *self.models, *self.adapters

    def is_model(self, name: str) -> bool:
        """Return whether a request's name of a model means that of the server, or one of its adapters."""
        return name in self.names or is_named(name, self.options.model)


def model_name(directory: str) -> str:
    """Return the name of the model in a directory: its repository's in the cache of the hub, or a short one."""
    path = Path(directory).absolute()
    for folder in (*reversed(path.parts), *reversed(path.resolve().parts)):
        if folder.startswith(_HUB_FOLDER):
            return folder.removeprefix(_HUB_FOLDER).replace("--", "/")
    short = sorted(model_names(directory) - {path.name, path.resolve().name})
    return short[0] if short else path.name
