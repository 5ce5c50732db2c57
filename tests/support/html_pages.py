"""Results files to make pages of, and pages as a strict reader sees them: every element closed in order."""

from __future__ import annotations

from html.parser import HTMLParser

from hpcdecode.data.prompts.kept import ALL, KeptColumns, Selection
from hpcdecode.data.prompts.rows import RowError
from hpcdecode.data.results.writer import Result, ResultsWriter

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'--><!--]]></style></title>&lt;\x00\x1b[31m\u202e"
)
MOST_BYTES = 1_000_000
VOID = {"meta", "br"}
ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "footer", "section", "article", "h1", "h2"),
    *(
        "h3",
        "h4",
        "p",
        "span",
        "div",
        "dl",
        "dt",
        "dd",
        "ul",
        "li",
        "figure",
        "figcaption",
        "table",
        "caption",
        "thead",
    ),
    *("tbody", "tr", "th", "td", "pre", "details", "summary", "svg", "desc", "path", "line", "text"),
}


class Page(HTMLParser):
    """A page that was read.

    Attributes:
        elements: Names and attributes in order.
        text: All text outside of <style>.
        faults: What is not well formed.
    """

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.faults, self._open = "", [], []
        self.feed(source)
        self.close()
        self.faults += [f"<{name}> is not closed" for name in self._open]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if len({name for name, _ in attributes}) < len(attributes):
            self.faults.append(f"<{tag}> has an attribute twice")
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self._open or self._open.pop() != tag:
            self.faults.append(f"</{tag}> closes another element")

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data

    def named(self, name: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements of a name."""
        return [attributes for tag, attributes in self.elements if tag == name]


def write_results(
    path, rows=50, errors=0, *, complete=True, prompt=None, texts=None, ids=None, columns=None, **attributes
):
    """Write a results file of `rows` rows, of a token each 0.1 s, and of errors with two causes."""
    kept = KeptColumns(Selection(ALL))
    stated = {"identity": {"prompts": ["p"]}, "job": {"seed": 1}, "model": {"path": "demo"}}
    summary = attributes.pop("summary", {})
    out = ResultsWriter(path, attributes=stated | attributes, kept=kept)
    for line in range(1, rows + 1):
        kept.read(line, {"prompt": prompt or f"prompt {line}", **(columns or {})})
        tokens, begin = line % 9 + 1, 1e9 + line
        text, row_id = (texts or f"text {line}"), (ids or f"row-{line}")
        reason = "stop" if line % 3 else "length"
        times = (begin, begin + 0.5, begin + 0.5 + tokens / 10)
        out.add(Result(line, row_id, 0, text, reason, line % 5 + 1, [7] * tokens, *times))
    for line in range(rows + 1, rows + errors + 1):
        reason = "prompt: expected a string, got null" if line % 3 else f"max_tokens: expected 1 or more, got -{line}"
        out.error(RowError(line, f"bad-{line}", reason))
    out.close(complete=complete, summary=summary)


def checked(source):
    """A page that is well formed, runs nothing and fetches nothing."""
    read = Page(source)
    assert read.faults == [] and {tag for tag, _ in read.elements} <= ALLOWED
    names = {name for _, attributes in read.elements for name in attributes}
    assert not names & {"src", "href", "srcset", "action"} and not any(name.startswith("on") for name in names)
    assert "url(" not in source and "@import" not in source and "http:" not in source and "https:" not in source
    assert read.named("meta")[2]["content"].startswith("default-src 'none'")
    ids = [attributes["id"] for _, attributes in read.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    for picture in read.named("svg"):
        told = picture.get("role") == "img" and {picture["aria-labelledby"], picture["aria-describedby"]} <= set(ids)
        assert told or picture.get("aria-hidden") == "true"
    assert all(cell.get("scope") in ("row", "col") for cell in read.named("th"))
    assert len(source.encode()) < MOST_BYTES
    return read
