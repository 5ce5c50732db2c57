"""The server: an engine over the ranks, whose lead takes rows over HTTP."""

from __future__ import annotations

import gc
import logging
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic, sleep
from typing import TYPE_CHECKING

import uvicorn

from hpcdecode.doctor import binding
from hpcdecode.engine.announce import announce
from hpcdecode.engine.engine import Engine
from hpcdecode.engine.live import LiveDesk, Room
from hpcdecode.engine.setup import together
from hpcdecode.engine.weight_facts import weight_facts
from hpcdecode.errors import UserError, first_line
from hpcdecode.ranks.fit import require_fit
from hpcdecode.ranks.team import Team, assemble
from hpcdecode.ranks.watchdog import Watchdog
from hpcdecode.report.metrics import Metrics, check_emptied
from hpcdecode.report.progress import NoProgress
from hpcdecode.report.stages import Stages
from hpcdecode.serve.app import make_app
from hpcdecode.serve.context import Context
from hpcdecode.serve.options import ServeOptions
from hpcdecode.system.signals import Signals
from hpcdecode.system.timeline import Timeline

if TYPE_CHECKING:
    from mpi4py import MPI

_BACKLOG = 2048  # connections that the system holds
_LEAVE_SECONDS = 5  # for answers to reach slow readers, at the end
_START_SECONDS = 30
logger = logging.getLogger(__name__)


def serve(options: ServeOptions, comm: MPI.Intracomm | None, signals: Signals) -> int:
    """Serve until a signal says to end, and the rows in flight are done.

    Args:
        options: Of the engine and the server.
        comm: The ranks; None for this process alone.
        signals: Signals, already entered as a context.

    Returns:
        The exit code.

    Raises:
        UserError: If the model cannot be run, or the address not be listened on.
    """
    timeline = Timeline()
    team = assemble(comm, options.wishes, options.device, options.r_device, weight_facts(options))
    require_fit(team.ranks)
    with Watchdog(team, timeline, options.stall_timeout):
        return _serve(options, team, timeline, signals)


def _serve(options: ServeOptions, team: Team, timeline: Timeline, signals: Signals) -> int:
    stages = Stages(announce=team.lead)
    problems = binding(team)
    if team.lead and problems:
        logger.warning("\n".join(problems))
    team.pin()
    stages.done("imports")
    listener = together(team, lambda: open_listener(options) if team.lead else None)
    engine = Engine(options, team, None, timeline)
    stages.done("model")
    signals.hold_interrupts()
    gc.freeze()
    gc.enable()
    if listener is None:
        metrics = engine.work(None, engine.scales(None), signals, NoProgress(), float("inf"))
    else:
        metrics = _lead(engine, options, listener, signals, stages)
    every = team.gather_all(metrics, Metrics)
    if team.lead and not signals.stopping:
        check_emptied(every)
    return 0


def _lead(engine: Engine, options: ServeOptions, listener: socket.socket, signals: Signals, stages: Stages) -> Metrics:
    """Serve on the lead; return what it counted."""
    context = Context(engine, options)
    room, most, names = Room.of(engine), options.max_waiting, context.adapters
    desk = LiveDesk(engine.tokenizer, options.model, room, context.deliver, most, names)
    context.open(desk)
    with _answering(context, options, listener):
        scales = engine.scales(desk)
        announce(engine, scales, stages)
        scheme, (host, port) = "https" if options.ssl_certfile else "http", listener.getsockname()[:2]
        at = f"[{host}]" if ":" in host else host
        logger.info(f"hpcdecode: serving {', '.join(context.models)} at {scheme}://{at}:{port}/v1")
        signals.drain_first(desk.drain, options.drain_seconds)
        metrics = desk.work(engine, scales, signals)
    done = f"{desk.rows:,} rows, {desk.generated_tokens:,} tokens"
    logger.info(f"hpcdecode: stopped by {signals.cause} after {done}")
    return metrics


@contextmanager
def _answering(context: Context, options: ServeOptions, listener: socket.socket) -> Iterator[None]:
    """Answer requests in a thread of its own."""
    config = uvicorn.Config(
        make_app(context),
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=_LEAVE_SECONDS,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), name="http", daemon=True)
    thread.start()
    end = monotonic() + _START_SECONDS
    while not server.started:
        if not thread.is_alive() or monotonic() > end:
            raise RuntimeError("the HTTP server has not started")
        sleep(0.01)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(2 * _LEAVE_SECONDS)


def open_listener(options: ServeOptions) -> socket.socket:
    """Return a socket with the address to listen on.

    Raises:
        UserError: The address cannot be had, or the certificate not be read.
    """
    if options.ssl_certfile:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
                options.ssl_certfile, options.ssl_keyfile
            )
        except (OSError, ssl.SSLError) as error:
            raise UserError(f"--ssl-certfile: expected a certificate and its key, got: {first_line(error)}") from error
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        # asyncio sets TCP_NODELAY on connections whose protocol is stated, and small answers take 40 ms without it.
        made = socket.socket(family, proto=socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((options.host, options.port))
    except OSError as error:
        raise UserError(
            f"--host {options.host} --port {options.port}: expected an address to listen on, got: {first_line(error)}; "
            "choose another --port, or 0 for any"
        ) from error
    return made
