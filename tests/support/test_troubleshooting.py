"""Messages lead to the page that explains them, which has their entries and quotes them."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import re
import sys
from email.message import Message
from pathlib import Path

import pytest

from lightning_axosparse import cli
from lightning_axosparse.support import troubleshooting
from lightning_axosparse.support.troubleshooting import (
    PAGE,
    page,
    require_cli,
    see,
    without_link,
)

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "lightning_axosparse"
FILE = str(REPOSITORY / PAGE)
TEXT = Path(FILE).read_text()
NO_ENTRIES = {"what-is-refused", "known-limits"}


def called(node: ast.AST) -> str:
    """The last name of what is called, or what is named."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_links_lead_to_headings_and_to_all_that_are_entries() -> None:
    headings = re.findall(r"^##+ (.*)$", TEXT, re.MULTILINE)
    entries = [heading.lower().replace(" ", "-") for heading in headings]
    assert len(entries) == len({*entries})
    used = {
        call.args[0].value
        for tree in (ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py"))
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and called(call) == "see"
    }
    assert used == {*entries} - NO_ENTRIES


@pytest.mark.parametrize(
    ("links", "address"),
    [
        ([], FILE),
        (["Source, https://host/source"], FILE),
        (["Documentation, https://host/docs/"], "https://host/docs/troubleshooting/"),
        (None, FILE),
    ],
)
def test_a_link_is_an_address_where_the_documentation_has_one(
    monkeypatch: pytest.MonkeyPatch, links: list[str] | None, address: str
) -> None:
    def metadata(name: str) -> Message:
        if links is None:
            raise importlib.metadata.PackageNotFoundError(name)
        message = Message()
        for link in links:
            message["Project-URL"] = link
        return message

    monkeypatch.setattr(importlib.metadata, "metadata", metadata)
    page.cache_clear()
    try:
        assert see("grid") == f" See {address}#grid."
        message = "A rank failed: it is late"
        assert without_link(ValueError(f"{message}.{see('grid')}")) == message
    finally:
        troubleshooting.page.cache_clear()


def test_a_message_without_a_link_stays_as_it_is() -> None:
    assert without_link(ValueError("See there. No link")) == "See there. No link"
    assert without_link(ValueError("A sentence.")) == "A sentence"


def test_a_missing_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_cli("A report")
    for module in ("hydra", "rich"):
        monkeypatch.setitem(sys.modules, module, None)
    message = r"A report needs hydra-core, rich, .* pip install hydra-core rich, or '\.\[cli\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        require_cli("A report")


def test_a_command_ends_with_these_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra", None)
    with pytest.raises(SystemExit, match="The command line needs hydra-core"):
        importlib.reload(cli)
