"""The page that messages lead to has their entries, and speaks of messages that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args

from lightning_axosparse.support.troubleshooting import PAGE, Entry, see

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "lightning_axosparse"
TEXT = (REPOSITORY / PAGE).read_text()
REFUSED = TEXT[TEXT.index("## What is refused") : TEXT.index("## Known limits")]
HEADINGS = re.findall(r"^### (.*)$", REFUSED, re.MULTILINE)


def calls(name: str) -> list[tuple[str, ast.Call]]:
    """All calls of a function in the package, and where they are."""
    return [
        (f"{path.relative_to(PACKAGE)}:{node.lineno}", node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == name
        and node.args
    ]


def test_every_refusal_says_where_it_is_explained() -> None:
    refusals = calls("MisconfigurationException")
    assert len(refusals) > 60
    without = [place for place, call in refusals if " + see('" not in ast.unparse(call.args[0])]
    assert without == []


def test_the_entries_are_the_headings() -> None:
    entries = [heading.lower().replace(" ", "-") for heading in HEADINGS]
    assert entries == list(get_args(Entry))
    assert {call.args[0].value for _, call in calls("see")} == set(entries)
    assert see("grid") == " See docs/troubleshooting.md#grid."


def test_the_page_quotes_messages_that_there_are() -> None:
    texts = [
        "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]
    everything = "\n".join(texts)
    for row in re.findall(r"^\| (`.*?) \| ", REFUSED, re.MULTILINE):
        for phrase in re.findall(r"`` (.*?) ``|`([^`]+)`", row):
            quoted = re.sub(r"\{.*?\}", "{}", next(filter(None, phrase)))
            assert quoted in everything, quoted
