"""The section on the configuration: values by name, and the ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec

from hpcdecode.ranks.roles import Rank
from hpcdecode.report import text
from hpcdecode.report.page.facts import LARGEST
from hpcdecode.report.page.markup import Html, cut, element, joined, table

_MOST_LINES = 64  # of ranks
_MOST_VALUES = 120  # of an attribute
_VALUE = 300  # characters
_TITLES = {"job": "Job", "model": "Model", "identity": "Identity", "versions": "Versions"}
_DEPTH = 4  # of objects in objects


def ranks_of(attributes: dict[str, Any]) -> list[Rank]:
    """Return the ranks of a job as it began, or none if the file does not say."""
    try:
        found = msgspec.convert(attributes.get("topology", []), type=list[Rank])
    except (msgspec.ValidationError, OverflowError):
        return []
    return found if all(0 <= r.kv_tokens <= LARGEST for r in found) else []


def topology(ranks: list[Rank]) -> Html:
    """Return a table of the ranks; of many, those that are alike are a line."""
    header, rows = text.topology_cells(ranks)
    more = len(rows) - _MOST_LINES
    found = table(header, rows[:_MOST_LINES], "Ranks", (5,))
    return joined([found, element("p", f"{more:,} more lines are not shown.") if more > 0 else ""])


def layout(ranks: list[Rank]) -> str:
    """Return the ranks and their layout in words."""
    both, s = (sum(r.role == role for r in ranks) for role in ("SR", "S"))
    hosts = len({r.host for r in ranks})
    where = f"on {hosts:,} hosts" if hosts > 1 else "on 1 host"
    if both == len(ranks):
        kind = f"{both:,} replicas" if both > 1 else "one rank of both roles"
        groups = len({r.rank if r.home is None else r.home for r in ranks})
        kind = f"{groups:,} groups of {both // groups:,} ranks" if both > groups > 0 else kind
    else:
        kind = f"{s:,} S + {sum(r.role == 'R' for r in ranks):,} R" + (f" + {both:,} of both roles" if both else "")
    wide = [f"{name} {size}" for name, size in (("tp", ranks[0].tp), ("pp", ranks[0].pp)) if size > 1]
    return ", ".join([f"{kind} {where}", *wide])


def values(attributes: dict[str, Any]) -> Html:
    """Return the attributes of the file that say what the job was, each as a list to open."""
    return joined(_values(title, attributes[name]) for name, title in _TITLES.items() if attributes.get(name))


def _values(title: str, value: Any) -> Html:
    pairs = list(_flat(value))
    items = [part for name, shown in pairs[:_MOST_VALUES] for part in (element("dt", name), element("dd", shown))]
    more = element("p", f"{len(pairs) - _MOST_VALUES:,} more values.") if len(pairs) > _MOST_VALUES else None
    return element("details", element("summary", title), element("dl", *items), more)


def _flat(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield names and values of objects in objects, without those that are null or empty."""
    if isinstance(value, dict) and value and depth < _DEPTH:
        for key, inner in value.items():
            yield from _flat(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif value not in (None, [], {}, ""):
        plain = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        yield cut(name, _VALUE), cut(plain, _VALUE)
