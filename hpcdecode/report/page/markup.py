"""HTML and SVG from untrusted values: all text and all attributes are escaped where an element is made."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

_VOID = ("meta", "br")
_PICTURES, _DELETE = 0x2400, 0x2421  # of control characters, and of DEL
_ODD = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufff9-\uffff\ud800-\udfff]"
)


class Html(str):
    """Markup that goes into a page as it is."""

    __slots__ = ()


def element(name: str, /, *children: str | None, **attributes: object) -> Html:
    """Return an element.

    Args:
        name: Its name.
        children: Its content in order: `Html` as it is, other text escaped, None left out.
        attributes: Its attributes, with `_` for `-` and without a `_` at the end of the name; None is left out.
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    opened = "".join([f"<{name}", *(f' {key}="{html.escape(visible(str(value)))}"' for key, value in pairs), ">"])
    if name in _VOID:
        return Html(opened)
    return Html("".join([opened, *(escaped(child) for child in children if child is not None), f"</{name}>"]))


def escaped(text: str) -> Html:
    """Return text as markup; markup is returned as it is."""
    return text if isinstance(text, Html) else Html(html.escape(visible(text)))


def joined(parts: Iterable[str]) -> Html:
    """Return several texts or pieces of markup as one piece of markup."""
    return Html("".join(escaped(part) for part in parts))


def visible(text: str) -> str:
    """Return text with pictures for control characters, and code points for those that reorder or break lines."""
    return _ODD.sub(_shown, text)


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(_PICTURES + code)
    if code == 0xFFFD:  # what stands for characters that cannot be shown
        return match[0]
    return chr(_DELETE) if code == 0x7F else f"\u27e8U+{code:04X}\u27e9"


def cut(text: object, most: int) -> str:
    """Return the begin of a text, and how many characters are left out."""
    whole = str(text)
    return whole if len(whole) <= most else f"{whole[:most]}\u2026 ({len(whole) - most:,} characters more)"


def table(
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    caption: str,
    numbers: Sequence[int] = (),
    *,
    long: bool = False,
) -> Html:
    """Return a table whose first column has the headers of the rows.

    Args:
        header: Names of the columns.
        rows: Cells by row.
        caption: What the table has, for those who do not see it.
        numbers: Places of the columns that are aligned to the right.
        long: Whether the first column has sentences.
    """
    css = ["number" if i in numbers else None for i in range(len(header))]
    head = [element("th", name, scope="col", class_=css[i]) for i, name in enumerate(header)]
    body = [element("tr", *(_cell(cell, first=i == 0, css=css[i]) for i, cell in enumerate(row))) for row in rows]
    whole = element(
        "table",
        element("caption", caption, class_="unseen"),
        element("thead", element("tr", *head)),
        element("tbody", *body),
        class_="long" if long else None,
    )
    return scrolled(whole, caption)


def _cell(text: str, *, first: bool, css: str | None) -> Html:
    return element("th", text, scope="row", class_=css) if first else element("td", text, class_=css)


def scrolled(content: Html, label: str) -> Html:
    """Return content that scrolls sideways in itself if the window is narrow, with the keyboard too."""
    return element("div", content, class_="scrolled", tabindex=0, role="region", aria_label=label)
