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
MODULES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")
}

WITHOUT_LINK = {
    # Users never see them.
    ("pipeline/crossing/placeholder.py", "AttributeError(name)"): "Python's protocol",
    ("pipeline/crossing/message.py", "NotImplementedError"): "of a base class",
    ("pipeline/stage_step.py", "NotImplementedError"): "of a base class",
    ("pipeline/stage_forward.py", "StageEdge("): "ends a step at the edge of a stage",
    ("pipeline/step_front.py", "_FirstLayer("): "ends a step at its first layer",
    ("pipeline/step_end.py", "RunAgain("): "caught: the batch runs again",
    ("pipeline/loss/by_parts.py", "FirstRead"): "caught: the batch runs again",
    ("support/object_trees.py", "CannotPickle("): "caught: part of a message with a link",
    ("pruning/rule.py", 'ValueError("it has no second moment'): "part of a message with a link",
    ("checkpoint/atomic_io.py", "OSError('; '.join"): "part of a message with a link",
    ("strategy/launcher/launcher.py", "_Terminated"): "becomes the signal again",
    ("strategy/launcher/pickling.py", "LookupError("): "of a file between caller and ranks",
    # The command line says the rest.
    ("cli/sweep.py", "SystemExit(1)"): "the table that was printed",
    # They pass on a message, which has a link if it is one of this package.
    ("cli/__init__.py", "SystemExit(str(error))"): "",
    ("callbacks/ticket_callback.py", "MisconfigurationException(str(error))"): "",
    ("pruning/selection.py", "ValueError('\\n'.join(found))"): "",
    ("strategy/launcher/launcher.py", "error"): "",
    ("strategy/step/learning.py", "self.warn(text)"): "",
    ("strategy/step/learning.py", "rank_zero_warn(text)"): "",
    ("strategy/step/train_step.py", "self._learner.warn(text)"): "",
    ("support/archive.py", "error.__context__"): "",
}
"""File and start of what is raised or warned of -> why it does not end with a link."""


def called(node: ast.AST) -> str:
    """The last name of what is called, or what is named."""
    if isinstance(node, ast.Call):
        node = node.func
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def names(node: ast.AST) -> set[str]:
    return {called(part) for part in ast.walk(node)} - {""}


def linked_names() -> set[str]:
    """Functions, classes and constants whose text has a link."""
    found = {"see"}
    for tree in MODULES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                texts = [part for part in ast.walk(node) if isinstance(part, ast.Return)]
                found |= {node.name for text in texts if "see" in names(text)}
            elif isinstance(node, ast.ClassDef):
                texts = [part for part in node.body if getattr(part, "name", "") == "__str__"]
                found |= {node.name for text in texts if "see" in names(text)}
        for node in tree.body:
            if isinstance(node, ast.Assign) and "see" in names(node.value):
                found.add(called(node.targets[0]))
    return found


def messages() -> list[tuple[str, ast.expr]]:
    """All that is raised, and all warnings, with the file."""
    found: list[tuple[str, ast.expr]] = []
    for file, tree in MODULES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and node.exc is not None:
                found.append((file, node.exc))
            elif isinstance(node, ast.Call) and called(node) in ("warn", "rank_zero_warn"):
                found.append((file, node))
    return found


def test_every_message_says_where_it_is_explained() -> None:
    linked, unused, without = linked_names(), set(WITHOUT_LINK), []
    assert {"see", "CorruptFileError", "endless", "_misuse"} <= linked
    assert len(messages()) > 200
    for file, raised in messages():
        if names(raised) & linked:
            continue
        text = ast.unparse(raised)
        known = {(f, start) for f, start in WITHOUT_LINK if f == file and text.startswith(start)}
        if not known:
            without.append(f"{file}:{raised.lineno}: {text}")
        unused -= known
    assert without == []
    assert unused == set()


def test_a_link_ends_its_message() -> None:
    for file, tree in MODULES.items():
        for node in ast.walk(tree):
            inside = isinstance(node, ast.BinOp) and "see" in names(node.left)
            inside |= isinstance(node, ast.JoinedStr) and "see" in names(node)
            assert not inside, f"{file}:{node.lineno}"


def test_links_lead_to_headings_and_to_all_that_are_entries() -> None:
    headings = re.findall(r"^##+ (.*)$", TEXT, re.MULTILINE)
    entries = [heading.lower().replace(" ", "-") for heading in headings]
    assert len(entries) == len({*entries})
    used = {
        call.args[0].value
        for tree in MODULES.values()
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and called(call) == "see"
    }
    assert used == {*entries} - NO_ENTRIES


def test_the_page_quotes_messages_that_there_are() -> None:
    texts = [
        "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        if isinstance(node, ast.JoinedStr)
        else node.value
        for tree in MODULES.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    ]
    everything = "\n".join(texts)
    rows = re.findall(r"^\| (`.*?) \| ", TEXT, re.MULTILINE)
    assert len(rows) > 100
    for row in rows:
        for phrase in re.findall(r"`` (.*?) ``|`([^`]+)`", row):
            quoted = re.sub(r"\{.*?\}", "{}", next(filter(None, phrase)))
            assert quoted in everything or quoted == "NAME=VALUE", quoted


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
