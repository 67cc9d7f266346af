from __future__ import annotations

import types

import pytest

from lightning_axosparse.support.patched import patched


class Base:
    @staticmethod
    def named(x):
        return "own", x

    def method(self):
        return "own", self


class Derived(Base):
    pass


def test_an_attribute_that_an_object_has_from_its_class_is_its_class_again():
    it = Base()
    with patched(it, "method", lambda: "other"):
        assert it.method() == "other"
        assert Base().method()[0] == "own"
    assert "method" not in vars(it)
    assert it.method() == ("own", it)


def fail_while_patched(module):
    with (
        patched(module, "value", 2),
        patched(Base, "named", staticmethod(lambda x: "other")),
    ):
        assert Base().named(1) == Derived.named(1) == "other"
        raise KeyError(module.value)


def test_own_attributes_come_back_after_an_error_and_as_they_were():
    module = types.ModuleType("module")
    module.value = 1
    before = vars(Base)["named"]
    with pytest.raises(KeyError, match="2"):
        fail_while_patched(module)
    assert module.value == 1
    assert vars(Base)["named"] is before


def test_one_inside_another():
    it = Base()
    with patched(it, "method", 1), patched(it, "method", 2):
        assert it.method == 2
    assert it.method() == ("own", it)
