"""Try every decoder of the installed transformers, tiny and random: does it run, refused by name, or wrong?

`python -m tests.survey [--json FILE] [--write FILE] [MODEL_TYPE ...]` prints a line for each model type, and how many
there are of each state. "works" says that float32 logits of two sequences, in three batches, are within 1e-4 of
transformers', in standard deviations of the logits where that is more than 1.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from tests.support import survey_page

CPU_SECONDS, SECONDS = 240, 1800  # for a model type, of all its threads and by the clock
BOUND_SIZES = ("bamba", "granitemoehybrid", "lfm2_moe", "mamba2")
LIMIT = 1e-4  # of the largest difference of logits


def try_type(name: str, folder: Path) -> dict[str, Any]:
    """Return state and reason of the model type `name`; folder: for its checkpoint."""
    from tests.support.whole_models import of_text, save_whole

    try:
        config = small_config(name)
        if config.is_encoder_decoder:
            return {"state": "encoder-decoder"}
        whole = save_whole(config, folder)
        with torch.no_grad():
            of_text(whole)(input_ids=torch.arange(2, 40)[None], use_cache=False)  # if it fails, no refusal means much
    except Exception as e:
        return {"state": "no tiny model", "reason": f"{type(e).__name__}: {e}"}
    return compare(whole, folder)


def small_config(name: str) -> Any:
    """Return the default config of a model type, shrunken; that of the tests if it has sizes that depend on others."""
    from tests.support.hybrids import HYBRIDS
    from tests.support.tiny import tiny

    return HYBRIDS[name]() if name in BOUND_SIZES else tiny(name)


def compare(whole: torch.nn.Module, folder: Path) -> dict[str, Any]:
    """Return state, reason and error of the checkpoint in `folder`, which `whole` was read from."""
    from hpcdecode.errors import UserError
    from hpcdecode.model import load_split
    from tests.support.whole_models import logits_difference

    try:
        model = load_split(folder, dtype="float32")
    except UserError as e:
        return {"state": "refused", "reason": str(e).partition("not supported: ")[2] or str(e)}
    except Exception as e:
        return {"state": "fails", "reason": f"loading: {type(e).__name__}: {e}"}
    try:
        error = logits_difference(model, whole)
    except Exception as e:
        return {"state": "fails", "reason": f"running: {type(e).__name__}: {e}"}
    return {"state": "works" if error < LIMIT else "wrong", "error": error}


def in_a_process(name: str) -> dict[str, Any]:
    """Return what `try_type` says in a process of its own, which may crash or hang."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
        signal.alarm(SECONDS)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        with tempfile.TemporaryDirectory() as folder:
            os.environ["HPCDECODE_CACHE"] = f"{folder}/cache"
            found = try_type(name, Path(folder))
        os.write(write, json.dumps(found).encode()[:60000])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    return json.loads(data) if data else {"state": "crashes", "reason": f"or takes longer than {CPU_SECONDS} s"}


def main() -> None:
    """Try the model types that are named, or all, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--json", help="file for the results")
    parser.add_argument("--write", help="page of documentation for the results of all types, in Markdown")
    args = parser.parse_args()
    if args.write and args.names:
        parser.error("--write: expected no model types, since the page has all; leave them out")
    torch.set_num_threads(1)
    import hpcdecode.model  # noqa: F401  once, for all processes
    import tests.support.whole_models  # noqa: F401

    kinds, found = survey_page.types(), {}
    for name in args.names or [name for names in kinds.values() for name in names]:
        found[name] = in_a_process(name)
        about = found[name]
        detail = f"{about['error']:.1e}" if "error" in about else about.get("reason", "").replace("\n", " ")
        print(f"{name:28} {about['state']:16} {detail:.160}", flush=True)
    for kind, names in kinds.items():
        states = Counter(found[n]["state"] for n in names if n in found)
        print(kind, sum(states.values()), dict(states.most_common()))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    if args.write:
        Path(args.write).write_text(survey_page.page(found))


if __name__ == "__main__":
    main()
