"""Writes tables and pictures as one HTML page that needs no other file and no network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Literal

from lightning_axosparse.callbacks.report.tables import Section

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto }
th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left }
td + td { font-variant-numeric: tabular-nums }
code { background: #f4f4f4; overflow-wrap: anywhere } img { max-width: 100% }
figure { margin: 1rem 0 } figure.masks { display: inline-block; margin-right: 1rem }
figure.plot { overflow-x: auto } figure.plot img { min-width: 44rem }
figcaption { font-size: 13px } figure.masks img { image-rendering: pixelated; width: 128px }
"""


def page(title: str, blocks: Sequence[str]) -> str:
    """Return a whole page.

    Args:
        title: in words.
        blocks: HTML, in order.
    """
    phone = '<meta name="viewport" content="width=device-width">'
    head = f'<meta charset="utf-8">{phone}<title>{escape(title)}</title><style>{_STYLE}</style>'
    body = [f"<h1>{escape(title)}</h1>", *blocks]
    lines = ['<!doctype html>\n<html lang="en">', f"<head>{head}</head>", "<body>", *body]
    return "\n".join([*lines, "</body></html>\n"])


def table(section: Section) -> str:
    """Return one table below its title."""
    head = "".join(f"<th>{escape(column)}</th>" for column in section.columns)
    rows = "\n".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in section.rows
    )
    return f"<h2>{escape(section.title)}</h2>\n<table>\n<tr>{head}</tr>\n{rows}\n</table>"


def picture(name: str, data: bytes, kind: Literal["png", "svg+xml"] = "png") -> str:
    """Return a picture that is part of the page."""
    text = base64.b64encode(data).decode()
    return f'<img alt="{escape(name)}" src="data:image/{kind};base64,{text}">'
