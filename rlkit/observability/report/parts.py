"""Pieces of HTML that every section uses: tables, values, settings that must not leave the machine."""

import json
import re
from collections.abc import Sequence
from html import escape
from typing import Any

from rlkit.observability.report.charts import number
from rlkit.observability.report.style import STYLE

_SECRET = re.compile(r"(key|token|secret|passw|credential|auth)", re.IGNORECASE)
HIDDEN = "(hidden)"


def table(caption: str, head: Sequence[str], rows: Sequence[Sequence[Any]], *, numeric: Sequence[int] = ()) -> str:
    """A table with headers; columns in `numeric` are aligned to the right. Cells are escaped; the first column names
    its row."""
    if not rows:
        return ""
    css = dict.fromkeys(numeric, ' class="num"')
    heads = "".join(f'<th scope="col"{css.get(i, "")}>{escape(name)}</th>' for i, name in enumerate(head))
    body = []
    for row in rows:
        first = f'<th scope="row"{css.get(0, "")}>{cell(row[0])}</th>'
        rest = "".join(f"<td{css.get(i, '')}>{cell(value)}</td>" for i, value in enumerate(row[1:], start=1))
        body.append(f"<tr>{first}{rest}</tr>")
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption, quote=True)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{heads}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def cell(value: Any) -> str:
    """As text, escaped; numbers short, None empty."""
    if value is None:
        return ""
    if isinstance(value, float):
        return escape(number(value))
    return escape(str(value))


def shown_value(name: str, value: Any) -> str:
    """A setting as text. What looks like a password, in the setting itself or in a variable that it sets, is hidden."""
    if value is None:
        return "unset"
    if isinstance(value, dict):
        return json.dumps({key: HIDDEN if _SECRET.search(key) else inner for key, inner in value.items()})
    if is_secret(name) and isinstance(value, str):
        return HIDDEN
    return value if isinstance(value, str) else json.dumps(value)


def is_secret(name: str) -> bool:
    """Names of settings that may hold a password; `--input-key` and other keys of columns are none."""
    words = name.split("_")
    return words[-1] in ("password", "secret", "token", "credentials") or name.endswith("api_key")


def details(summary: str, content: str, *, is_open: bool = False, css: str = "") -> str:
    if not content:
        return ""
    opened = " open" if is_open else ""
    return f'<details class="{css}"{opened}><summary>{escape(summary)}</summary>{content}</details>'


def page_of(
    title: str, subtitle: str, sections: Sequence[tuple[str, str, str]], *, above: str = "", footer: str = ""
) -> str:
    """A whole page of (anchor, heading, content). `above` stands under the links. Nothing but `title` and `subtitle` is
    escaped here."""
    body = "".join(
        f'<section aria-labelledby="{anchor}"><h2 id="{anchor}">{heading}</h2>{content}</section>'
        for anchor, heading, content in sections
    )
    links = "".join(f'<li><a href="#{anchor}">{heading}</a></li>' for anchor, heading, _ in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>rlkit: {escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<a class="skip" href="#{sections[0][0]}">Skip to the first section</a>'
        f'<header><h1>{escape(title)}</h1><p class="soft">{escape(subtitle)}</p>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>{above}</header>'
        f"<main>{body}</main><footer><p>{escape(footer)}</p></footer></body></html>"
    )
