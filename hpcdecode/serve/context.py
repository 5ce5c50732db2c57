"""What the routes of the server share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from fastapi import APIRouter

from hpcdecode.data.prompts.tokenizer import Tokenizer
from hpcdecode.engine.live import LiveDesk
from hpcdecode.requests.params import SamplingParams
from hpcdecode.serve.hub import Hub

MIB = 1 << 20


@dataclass(frozen=True)
class RequestBounds:
    """What one request may take.

    Attributes:
        body_bytes: Of a body.
        file_bytes: Of a body that is sent to /v1/files.
        choices: Prompts of a request times their samples.
        stall_seconds: After which a reader of a stream that takes nothing is given up.
    """

    body_bytes: int = 32 * MIB
    file_bytes: int = 512 * MIB
    choices: int = 2048
    stall_seconds: float = 120.0


@dataclass
class Context:
    """What the routes of the server share.

    Attributes:
        desk: Takes rows. It is made with `hub.deliver`.
        hub: Hands out what happens to them.
        tokenizer: Of the model.
        model: Directory of the model.
        models: Names under which requests may ask for it, too; the first is shown.
        max_model_len: Positions of the model.
        kv_capacity: Tokens that the KV caches have room for.
        defaults: Sampling parameters that the fields of requests replace, but for max_tokens.
        api_key: Clients must send it; None for no key.
        created: Unix time of the server's start.
        bounds: What one request may take.
        routers: Further routes.
    """

    desk: LiveDesk
    hub: Hub
    tokenizer: Tokenizer
    model: str
    models: Sequence[str]
    max_model_len: int
    kv_capacity: int
    defaults: SamplingParams = field(default_factory=SamplingParams)
    api_key: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    bounds: RequestBounds = field(default_factory=RequestBounds)
    routers: Sequence[APIRouter] = ()
