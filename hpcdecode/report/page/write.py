"""Writes the page: `hpcdecode report OUT.h5 -o run.html`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import h5py

from hpcdecode._version import __version__
from hpcdecode.errors import UserError
from hpcdecode.ranks.roles import Rank
from hpcdecode.report import account
from hpcdecode.report.account import Account
from hpcdecode.report.page import config, kv, rows, shares
from hpcdecode.report.page.busy import BusyTimes, busy_charts, read_busy
from hpcdecode.report.page.facts import LARGEST, RunFacts, read_facts, require_sound
from hpcdecode.report.page.markup import Html, cut, element, joined, table
from hpcdecode.report.page.scales import duration
from hpcdecode.report.page.style import STYLE
from hpcdecode.system.durable import destination, replacing, write_errors

ENDINGS = (".html", ".htm")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # no script runs, and nothing is fetched
_MOST_PARTS = 64  # of merged results that are listed


def write_page(path: str, out: str, *, overwrite: bool = False) -> None:
    """Write the page of a results file or of a trace.

    Args:
        path: The results file, or a file that `generate --trace` wrote.
        out: The page.
        overwrite: Whether a file with the name `out` is replaced.

    Raises:
        UserError: It is neither, or the page cannot be written.
    """
    target = destination(out)
    if target.exists() and (not overwrite or (os.path.exists(path) and os.path.samefile(target, path))):
        raise UserError(f"{out}: exists already; use --overwrite to replace it, or choose another -o")
    content = _content(path).encode("utf-8", "replace")
    with write_errors(out, "free some space"), replacing(target) as file:
        file.write(content)


def _content(path: str) -> str:
    if os.path.isfile(path) and not h5py.is_hdf5(path):
        accounts = account.read(path)
        require_sound(accounts, path)
        return trace_page(os.path.basename(path), accounts, read_busy(path, [a.rank for a in accounts]))
    return page(read_facts(path))


def page(facts: RunFacts) -> str:
    """Return the page of a job as one HTML document, which needs no other file and runs no script."""
    ranks = config.ranks_of(facts.attributes)
    sections = [
        ("Throughput over time", _throughput(facts)),
        ("KV load over time", _kv(facts, ranks)),
        ("Ranks", _ranks(facts, ranks)),
        ("Rows", _rows(facts)),
        ("Errors by cause", rows.errors(facts.causes, facts.errors) if facts.errors else None),
        ("Texts of some rows", rows.texts(facts.shown) if facts.shown else None),
        ("Configuration", config.values(facts.attributes)),
    ]
    return _document(facts.name, _header(facts, ranks), sections)


def trace_page(name: str, accounts: list[Account], busy: BusyTimes | None) -> str:
    """Return the page of a trace, which has times of the ranks and no rows."""
    state = element("span", "trace", class_="state")
    hosts = len({a.host for a in accounts})
    figures = [("ranks", f"{len(accounts):,}"), ("hosts", f"{hosts:,}")]
    figures.append(("longest work of a rank", duration(max(a.work for a in accounts))))
    head = element("dl", *(_fact(what, value) for what, value in figures), class_="facts")
    sections = [
        ("Ranks over time", busy_charts(busy, accounts) if busy else None),
        ("Where the time went", shares.shares(accounts)),
        ("KV load over time", kv.kv_load(accounts, {}, None)),
    ]
    return _document(name, element("header", element("h1", f"{name} ", state), head), sections)


def _document(name: str, header: Html, sections: Sequence[tuple[str, Html | None]]) -> str:
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("title", f"{name}: hpcdecode report"),
        element("style", Html(STYLE)),
    )
    main = [element("section", element("h2", title), content) for title, content in sections if content]
    footer = element("footer", f"Made by hpcdecode report {__version__} from {name}.")
    body = element("body", header, element("main", *main), footer)
    return f"<!doctype html>\n{element('html', head, body, lang='en')}\n"


def _header(facts: RunFacts, ranks: list[Rank]) -> Html:
    state = "complete" if facts.complete else "not complete"
    if facts.merged:
        state += f", merged from {len(facts.summaries):,}"
    model = facts.attributes.get("model")
    model = model if isinstance(model, dict) else {"path": model}
    kinds = model.get("architectures")
    said = [
        model.get("path") or "model not stated",
        *(kinds if isinstance(kinds, list) else [])[:4],
        *(f"{name.replace('_', ' ')} {model[name]}" for name in ("weights", "dtype", "kv_dtype") if model.get(name)),
    ]
    return element(
        "header",
        element("h1", f"{facts.name} ", element("span", state, class_="state" if facts.complete else "state bad")),
        element("p", ", ".join(cut(part, 200) for part in said), class_="muted lead"),
        element("dl", *(_fact(name, value) for name, value in _figures(facts, ranks)), class_="facts"),
    )


def _fact(name: str, value: str) -> Html:
    return element("div", element("dt", name), element("dd", value))


def _figures(facts: RunFacts, ranks: list[Rank]) -> list[tuple[str, str]]:
    """Return the figures of the head line: names and values."""
    done, seconds = facts.lines + facts.errors, _seconds(facts)
    job = _object(facts.attributes.get("job"))
    limit, verb = job.get("limit"), "scored" if job.get("score") is True else "generated"
    most = f"of at most {limit:,} rows done" if isinstance(limit, int) else "rows done so far"
    found = [(f"of {done:,} rows done" if facts.complete else most, f"{done:,}"), ("errors", f"{facts.errors:,}")]
    if facts.samples != facts.lines:
        found.append(("samples", f"{facts.samples:,}"))
    found += [(f"tokens {verb}", f"{facts.generated_tokens:,}"), ("prompt tokens", f"{facts.prompt_tokens:,}")]
    if seconds:
        found += [("of work", duration(seconds)), ("tokens/s", f"{facts.generated_tokens / seconds:,.1f}")]
    if ranks:
        number = sum(len(own) for own in facts.accounts) or len(ranks)
        ranks_now = number if facts.merged else len(ranks)
        layout = config.layout(ranks) + (" in the first part" if facts.merged else "")
        found.append((f"{'rank' if ranks_now == 1 else 'ranks'}: {layout}", f"{ranks_now:,}"))
    return found


def _seconds(facts: RunFacts) -> float:
    """Return the seconds of the job's work; 0 if they are not known."""
    seconds = facts.summaries[0].get("seconds") if len(facts.summaries) == 1 else None
    if isinstance(seconds, (int, float)) and 0 < seconds < 1e12:
        return float(seconds)
    return float(facts.flow.edges[-1]) if facts.flow else 0.0


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _throughput(facts: RunFacts) -> Html | None:
    return rows.throughput(facts.flow) if facts.flow else None


def _kv(facts: RunFacts, ranks: list[Rank]) -> Html | None:
    """Return the KV load that ranks counted, else the one that follows from the rows."""
    capacities = {r.rank: r.kv_tokens for r in ranks if r.has_r and r.kv_tokens > 0}
    if len(facts.accounts) == 1 and not facts.merged:
        job = _object(facts.attributes.get("job"))
        limit = job.get("load_limit") if job.get("schedule") == "load-control" else None
        counted = kv.kv_load(
            facts.accounts[0], capacities, limit if isinstance(limit, int) and limit < LARGEST else None
        )
        if counted:
            return counted
    whole = sum(capacities.values()) if capacities and not facts.merged else None
    return kv.kv_estimate(facts.flow, whole) if facts.flow else None


def _ranks(facts: RunFacts, ranks: list[Rank]) -> Html | None:
    accounts: list[Account] = [a for own in facts.accounts for a in own]
    parts = []
    if accounts:
        parts += [element("h3", "Where the time went"), shares.shares(accounts)]
    elif ranks:
        parts.append(element("p", "Times of the ranks come at the end of the job.", class_="muted"))
    if facts.merged:
        parts += [element("h3", "Merged parts"), _parts(facts)]
    if ranks:
        title = "Topology of the first part" if facts.merged else "Topology"
        parts += [element("h3", title), config.topology(ranks)]
    return joined(parts) if parts else None


def _parts(facts: RunFacts) -> Html:
    """Return a table of the parts that were merged."""
    names = {"rows": "rows", "errors": "errors", "generated_tokens": "tokens", "seconds": "seconds"}
    names |= {"tokens_per_second": "tokens/s"}
    lines = [
        (str(number), *(_number(part.get(name)) for name in names), f"{len(own):,}")
        for number, (part, own) in enumerate(zip(facts.summaries, facts.accounts, strict=True), 1)
    ]
    return table(("part", *names.values(), "ranks"), lines[:_MOST_PARTS], "Merged parts", range(1, 7))


def _number(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "-"
    return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _rows(facts: RunFacts) -> Html | None:
    if not facts.samples and not facts.errors:
        return element("p", "No row is done.")
    pictures = []
    if facts.prompts:
        pictures.append(element("div", rows.lengths("Lengths of prompts", facts.prompts, "bar2")))
    if facts.texts:
        pictures.append(element("div", rows.lengths("Lengths of generated texts", facts.texts, "bar1")))
    reasons = joined([element("h3", "Finish reasons"), rows.finish_reasons(facts)])
    return joined([reasons, element("div", *pictures, class_="pair") if pictures else ""])
