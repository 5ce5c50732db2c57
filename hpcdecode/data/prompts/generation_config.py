"""The sampling parameters that a model's generation_config.json states."""

from __future__ import annotations

import os

import msgspec

from hpcdecode.errors import RowProblem, UserError
from hpcdecode.model.frontend.config import read_json
from hpcdecode.model.frontend.gguf.folder import model_folder
from hpcdecode.requests.field_types import typed
from hpcdecode.requests.params import SamplingParams, sampling_kinds

FILE = "generation_config.json"
OF_SAMPLING = ("temperature", "top_k", "top_p", "min_p")  # not in use if do_sample is false
NAMES = (*OF_SAMPLING, "repetition_penalty")


def stated_sampling(model: str | os.PathLike[str]) -> dict[str, object]:
    """Return the sampling parameters that a model states, by name; none if it states none.

    Args:
        model: Model directory, or a GGUF file.

    Raises:
        UserError: A value cannot be used.
    """
    file = model_folder(model) / FILE
    stated = read_json(file)
    names = NAMES if stated.get("do_sample", True) else NAMES[len(OF_SAMPLING) :]
    kinds = sampling_kinds()
    try:
        found = {name: typed(name, kinds[name], stated[name]) for name in names if stated.get(name) is not None}
        msgspec.structs.replace(SamplingParams(), **found).check()
    except RowProblem as problem:
        raise UserError(f"{file}: {problem}; mend it, or leave --generation-config out", everywhere=True) from problem
    return found
