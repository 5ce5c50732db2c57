"""Silence libraries that would write to the user's terminal, or take notes that nobody reads."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from logging import ERROR


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and the tracer inside the block."""
    from transformers.utils import logging

    hide_bars: Callable[[], None] = logging.disable_progress_bar
    show_bars: Callable[[], None] = logging.enable_progress_bar
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(ERROR)
    hide_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            show_bars()


@contextlib.contextmanager
def no_stacks() -> Iterator[None]:
    """Let the tracer take no note of where operators were called inside the block, a tenth of its time."""
    from torch.fx import config

    before, config.do_not_emit_stack_traces = config.do_not_emit_stack_traces, True
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before
