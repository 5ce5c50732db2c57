"""`hpcdecode serve`: from flags to a server."""

from __future__ import annotations

import argparse
import gc
import os
from typing import TYPE_CHECKING

from hpcdecode.cli.arguments import add_verbosity, parsed, pick
from hpcdecode.cli.parser_flags import add_parsers
from hpcdecode.cli.size_flags import add_faults, add_model, add_size
from hpcdecode.errors import UserError, first_line
from hpcdecode.ranks import launch
from hpcdecode.serve.options import ServeOptions
from hpcdecode.system.model_path import find_model
from hpcdecode.system.signals import Signals
from hpcdecode.system.sizes import parse_bytes

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpcdecode.cli.arguments import Group, Subcommands

KEY_VARIABLE = "HPCDECODE_API_KEY"


def _add_serve(commands: Subcommands) -> None:
    parser = commands.add_parser(
        "serve",
        help="answer requests of the OpenAI API over HTTP",
        description="Load a model, over the ranks that a launcher started or in this process, and answer requests of "
        "the OpenAI API. SIGTERM or Ctrl-C ends it once the rows in flight are done.",
        argument_default=argparse.SUPPRESS,
    )
    add_model(parser)
    add_verbosity(parser)
    _add_http(parser.add_argument_group("HTTP"))
    group = parser.add_argument_group("time")
    help = "time that rows in flight have to finish once the server is told to end (60)"
    group.add_argument("--drain-seconds", type=float, metavar="SECONDS", help=help)
    add_faults(group)
    add_parsers(parser.add_argument_group("parts of the texts"), budget=False)
    add_size(parser.add_argument_group("size (auto if not given)"), ServeOptions)
    parser.set_defaults(run=_serve, connect=launch.world, signals=Signals())


def _add_http(group: Group) -> None:
    add = group.add_argument
    help = "address to listen on; 0.0.0.0 for all of the machine (127.0.0.1, which other machines cannot reach)"
    add("--host", metavar="ADDRESS", help=help)
    add("--port", type=int, metavar="N", help="port to listen on; 0 for any free one (8000)")
    help = f"key that requests must have as their bearer token; may be given several times (default: {KEY_VARIABLE}, "
    help += "which other users of the machine cannot see; without any, everyone who reaches the port is let in)"
    add("--api-key", dest="api_keys", action="append", metavar="KEY", help=help)
    help = "name by which requests may ask for the model, beside that of its directory; may be given several times"
    add("--served-model-name", action="append", metavar="NAME", help=help)
    add("--ssl-certfile", metavar="FILE", help="certificate, for HTTPS")
    add("--ssl-keyfile", metavar="FILE", help="key of the certificate, if that is not in the same file")
    help = "rows that may wait for room; requests beyond them are answered by 429 (4096)"
    add("--max-waiting", type=int, metavar="N", help=help)
    add("--max-body", type=parsed(parse_bytes), metavar="SIZE", help="most bytes of a request (32M)")
    add("--max-file", type=parsed(parse_bytes), metavar="SIZE", help="most bytes of a file that is uploaded (1G)")
    help = (
        "folder of uploaded files and of batches, which go on from it when the server is started again (default: one "
    )
    help += "in the cache directory for each --port)"
    add("--data-dir", metavar="DIR", help=help)


def _serve(options: argparse.Namespace, comm: MPI.Intracomm | None) -> int:
    values = dict(vars(options))  # only flags that were given, since none has a default
    values["model"] = launch.lead_first(comm, lambda: find_model(values.get("model"), os.environ))
    if "api_keys" not in values and (key := os.environ.get(KEY_VARIABLE)):
        values["api_keys"] = [key]
    if comm is not None and values.get("layout", "auto") == "auto":
        values["layout"] = "split"
    made = pick(ServeOptions, values).check()
    gc.disable()  # until the server has loaded what stays; collections would traverse all of it repeatedly
    try:
        from hpcdecode.serve.server import serve
    except (ImportError, MemoryError) as error:
        raise UserError(
            f"expected the libraries that hpcdecode serve needs to load: {first_line(error)}; "
            "pip install 'hpcdecode[serve]'"
        ) from error
    return serve(made, comm, options.signals)


COMMANDS = (_add_serve,)
