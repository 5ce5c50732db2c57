"""`hpcdecode generate` and `hpcdecode score`: from flags and a job file to a Job."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hpcdecode.cli import log
from hpcdecode.cli.arguments import pick
from hpcdecode.cli.default_output import default_output
from hpcdecode.cli.generate_flags import add_flags, add_score_flags
from hpcdecode.cli.job_file import read_job_file
from hpcdecode.config import LITERAL, Job
from hpcdecode.data.prompts.continuations import SCORING_PARAMS
from hpcdecode.errors import RowProblem, UserError, first_line
from hpcdecode.ranks import launch
from hpcdecode.requests.params import SamplingParams
from hpcdecode.system.fetched import PACKAGES
from hpcdecode.system.model_path import find_model, short_names
from hpcdecode.system.signals import Signals

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.cli.arguments import Subcommands

logger = logging.getLogger(__name__)


def _add_generate(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "generate",
        help="generate text for the rows of a prompt file",
        description="Generate text for every row of the prompt files, into one HDF5 file. The same command again "
        "continues an interrupted job. Exit codes: 0 if all rows are done; 3 if all are done but those under /errors; "
        "75 if the job stopped with rows left (SIGUSR1, end of its time) and is to be started again; 128 + n if signal "
        "n stopped it; 2 if it cannot run as asked; 1 if it failed.",
        argument_default=argparse.SUPPRESS,
    )
    add_flags(parser)
    parser.set_defaults(run=_generate, connect=launch.world, signals=Signals())


def _add_score(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "score",
        help="log-probabilities of given continuations, choices and texts",
        description="Score every row of the prompt files: continuations of a prompt, choices by the probability of the "
        "next token, or the perplexity of a text. Nothing is generated. Results, resumption and exit codes are those "
        "of generate.",
        argument_default=argparse.SUPPRESS,
    )
    add_score_flags(parser)
    parser.set_defaults(run=_score, connect=launch.world, signals=Signals())


def _given(options: argparse.Namespace, comm: MPI.Intracomm | None) -> dict[str, Any]:
    """Return the values of the job file, and of the flags, which override them."""
    given = vars(options)  # only flags that were given, since none has a default
    values = {**(read_job_file(options.job) if "job" in given else {}), **given}
    values["model"] = launch.lead_first(comm, lambda: find_model(values.get("model"), os.environ))
    return values


def _score(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    values = _given(options, comm)
    params = _checked({**{name: values[name] for name in SCORING_PARAMS if name in values}, "max_tokens": 1})
    values.pop("profile", None)  # a job file may be that of `generate`, too
    return _run_files(params, {**values, "score": True}, options, comm)


def _generate(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    values = _given(options, comm)
    if values.get("texts") and short_names(Path(values["model"]).resolve()) & PACKAGES.keys():
        values.setdefault("chat", True)  # these models answer messages only
    if values.get("generation_config") == "auto":
        values = {**_stated(values["model"], values), **values}
    if values.get("profile") and values.get("kv_swap") and "schedule" not in values:
        values["choose_schedule"] = True
    params = _checked(values)
    if texts := values.pop("texts", None):
        return _answer(texts, params, values, options, comm)
    return _run_files(params, values, options, comm)


def _checked(values: dict[str, Any]) -> SamplingParams:
    try:
        return pick(SamplingParams, values)
    except RowProblem as problem:
        raise UserError(f"--{problem}".replace("_", "-", 2), everywhere=True) from None


def _run_files(
    params: SamplingParams, values: dict[str, Any], options: argparse.Namespace, comm: MPI.Intracomm | None
) -> int:
    """Run a job whose prompts are files."""
    if "prompts" not in values:
        text = "" if values.get("score") else ", or -p TEXT"
        files = f"at least one prompt file{',' if text else ' or'} a job file that names some{text}"
        raise UserError(f"expected {files}, got none", everywhere=True)
    values["output"] = values.get("output") or default_output(values["prompts"], values.get("shard"))
    return _run(params, values, options, comm)


def _stated(model: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that a model states and `values` do not, and say which."""
    from hpcdecode.data.prompts.generation_config import FILE, stated_sampling

    found = {name: value for name, value in stated_sampling(model).items() if name not in values}
    if launch.is_lead():
        logger.info(f"{FILE}: {', '.join(f'{name} {value}' for name, value in found.items()) or 'nothing to take'}")
    return found


def _answer(
    texts: list[str],
    params: SamplingParams,
    values: dict[str, Any],
    options: argparse.Namespace,
    comm: MPI.Intracomm | None,
) -> int:
    """Generate text for prompts that the command line gives, and print it; without -o, nothing else is kept or said."""
    if "prompts" in values:
        raise UserError("expected prompts by -p or prompt files, got both", everywhere=True)
    values["prompts"] = tuple(LITERAL + quote(text, safe="").replace(".", "%2E") for text in texts)
    if "output" not in values and options.verbosity == logging.INFO:
        log.set_up(logging.WARNING)
    with _kept(values.get("output")) as output:
        code = _run(params, {**values, "output": output}, options, comm)
        if launch.is_lead() and os.path.exists(output):
            _print_texts(output)
    return code


@contextmanager
def _kept(output: str | None) -> Iterator[str]:
    """Yield the file for the results; without one, one that is deleted afterwards."""
    if output is not None:
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="hpcdecode-") as folder:
        yield str(Path(folder) / "answers.h5")


def _print_texts(output: str) -> None:
    from hpcdecode.data.results.read import Results
    from hpcdecode.data.results.show import said

    with Results(output) as results:
        for i, row in enumerate(results):
            print(("\n" if i else "") + said(row))
        for error in results.errors():
            logger.error(f"hpcdecode: error: prompt {error['line']}: {error['reason']}")
    sys.stdout.flush()


def _run(
    params: SamplingParams, values: dict[str, Any], options: argparse.Namespace, comm: MPI.Intracomm | None
) -> int:
    job = pick(Job, {**values, "params": params}).check()
    gc.disable()  # until generate() has loaded what stays; collections would traverse all of it repeatedly
    try:
        from hpcdecode.generate import generate
    except (ImportError, MemoryError) as error:
        expected = "expected the libraries that hpcdecode needs to load"
        raise UserError(
            f"{expected}: {first_line(error)}; give the process more memory, or install them anew"
        ) from error
    return generate(job, comm, signals=options.signals)


COMMANDS = (_add_generate, _add_score)
