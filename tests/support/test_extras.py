from __future__ import annotations

import importlib
import sys

import pytest

from lightning_axosparse import cli
from lightning_axosparse.support.extras import require_cli


def test_a_missing_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_cli("A report")
    for module in ("hydra", "rich"):
        monkeypatch.setitem(sys.modules, module, None)
    message = r"A report needs hydra-core, rich, .* pip install 'lightning-axosparse\[cli\]'"
    with pytest.raises(ModuleNotFoundError, match=message):
        require_cli("A report")


def test_a_command_ends_with_these_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hydra", None)
    with pytest.raises(SystemExit, match="The command line needs hydra-core"):
        importlib.reload(cli)
