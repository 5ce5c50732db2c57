"""What the tokens of batches depend on, and what their results files say of the engine."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from hpcdecode.config import EngineOptions, Job
from hpcdecode.data.results.identity import identity
from hpcdecode.engine.engine import Engine
from hpcdecode.report.metrics import versions


def about_of(engine: Engine) -> dict[str, Any]:
    """Return everything that tokens depend on but requests, such as the model's files and the data types."""
    options = engine.options
    values = {name: getattr(options, name) for name in EngineOptions.__struct_fields__}
    job = Job(**values, prompts=(), output="")
    return identity(job, (), engine.setup.dtype, engine.setup.kv_dtype)


def attributes_of(engine: Engine) -> dict[str, Any]:
    """Return the root attributes of results files."""
    setup = engine.setup
    model = {
        "path": os.path.abspath(engine.options.model),
        "architectures": engine.model.facts.architectures,
        "layers": len(setup.shapes),
        "dtype": setup.dtype,
        "kv_dtype": setup.kv_dtype,
    }
    return {"model": model, "versions": versions(), "topology": msgspec.to_builtins(engine.team.ranks)}
