"""Silence libraries that would write to the user's terminal."""

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
