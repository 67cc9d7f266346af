import platform
from pathlib import Path

import pytest

from lightning_axosparse.support import processor
from lightning_axosparse.support.processor import cpu_info


def test_linux_describes_an_x86_core():
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        pytest.skip("other systems and processors describe themselves otherwise")
    assert cpu_info()["vendor_id"]
    assert "sse2" in cpu_info()["flags"].split()


def test_the_first_core_speaks_for_all(monkeypatch):
    described = "vendor_id\t: AuthenticAMD\nflags\t\t: a b\nbugs\t:\n\nvendor_id\t: Another\n"
    monkeypatch.setattr(Path, "read_text", lambda self: described)
    info = processor.cpu_info.__wrapped__()
    assert (info["vendor_id"], info["flags"], info["bugs"]) == ("AuthenticAMD", "a b", "")


def test_other_systems_describe_nothing(monkeypatch):
    def missing(self):
        raise FileNotFoundError(self)

    monkeypatch.setattr(Path, "read_text", missing)
    assert processor.cpu_info.__wrapped__()["flags"] == ""
