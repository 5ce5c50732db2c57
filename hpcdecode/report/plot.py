"""Plots, such as that of a job's accounts: every rank's shares, and the load of the R-ranks over time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hpcdecode.errors import UserError
from hpcdecode.report.account import GROUPS, Account
from hpcdecode.system.durable import destination, replacing

_COLOURS = {"busy": "#4477aa", "overhead": "#ccbb44", "wait": "#ee6677", "bubble": "#bbbbbb"}


def canvas() -> Any:
    """Return pyplot of matplotlib, which is not typed.

    Raises:
        UserError: If matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("drawing needs matplotlib: pip install 'hpcdecode[plot]', or leave out -o") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(pyplot: Any, figure: Any, path: str) -> None:
    """Write a figure to `path`, in the format of its suffix or as PNG, and close the figure.

    Raises:
        UserError: If the file cannot be written.
    """
    try:
        with replacing(destination(path)) as file:
            figure.savefig(file, format=Path(path).suffix[1:] or "png", dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: expected the name of a picture that can be written: {error}") from None
    finally:
        pyplot.close(figure)


def draw(accounts: list[Account], path: str) -> None:
    """Plot the accounts of a job's ranks into a file.

    Raises:
        UserError: If matplotlib is not installed, or the file cannot be written.
    """
    pyplot = canvas()
    figure, (shares, load) = pyplot.subplots(2, 1, figsize=(9, 3.5 + 0.3 * len(accounts)), layout="constrained")
    _draw_shares(shares, accounts)
    _draw_load(load, accounts)
    save(pyplot, figure, path)


def _draw_shares(axes: Any, accounts: list[Account]) -> None:
    names = [f"rank {a.rank} {a.role}" for a in accounts]
    left = [0.0] * len(accounts)
    for group in GROUPS:
        widths = [a.share(group) for a in accounts]
        axes.barh(names, widths, left=left, color=_COLOURS[group], label=group)
        left = [x + width for x, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of the work's time")
    axes.legend(ncols=len(GROUPS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _draw_load(axes: Any, accounts: list[Account]) -> None:
    for account in accounts:
        if account.load:
            seconds, tokens = zip(*account.load, strict=True)
            axes.plot(seconds, tokens, drawstyle="steps-post", label=f"rank {account.rank}")
    axes.set(xlabel="seconds since the start", ylabel="tokens in the KV cache")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
