"""Names and methods in the modules of transformers that mean something else while a model is traced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def replaced_names(
    modules: Iterable[torch.nn.Module], stand_in: Callable[[str, object], object | None]
) -> Iterator[None]:
    """Let names mean stand-ins inside the block, in every Python module that defines one of `modules`.

    Args:
        modules: Modules of a model of transformers.
        stand_in: Returns what a name, of the given value, stands for inside the block; None if it stays as it is.
    """
    replaced: list[tuple[dict[str, object], str, object]] = []
    try:
        for defining in sorted({type(m).__module__ for m in modules}):
            names = vars(sys.modules[defining])
            for name, value in list(names.items()):
                if (other := stand_in(name, value)) is not None:
                    replaced.append((names, name, value))
                    names[name] = other
        yield
    finally:
        for names, name, value in replaced:
            names[name] = value


@contextlib.contextmanager
def replaced_methods(
    modules: Iterable[torch.nn.Module],
    stand_ins: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]],
    method: str = "forward",
) -> Iterator[None]:
    """Let classes have another method inside the block. Those of single modules would make layers look unlike.

    Args:
        modules: Modules of a model of transformers.
        stand_ins: Returns the method in place of the one it is given, by the name of the class.
        method: Its name.
    """
    kinds: set[Any] = {type(m) for m in modules}
    own = {kind: getattr(kind, method) for kind in kinds if kind.__name__ in stand_ins}
    for kind, replaced in own.items():
        setattr(kind, method, stand_ins[kind.__name__](replaced))
    try:
        yield
    finally:
        for kind, replaced in own.items():
            setattr(kind, method, replaced)
