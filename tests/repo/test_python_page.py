"""The page about the Python API names all that the native part's stub has, with its arguments, and nothing else."""

from __future__ import annotations

import ast
import re
from functools import cache
from typing import TypeAlias

import pytest

from repo.tree import ROOT

PAGE = ROOT / "docs/reference/python.md"
# What the page calls an object, where that isn't its class in small letters.
CALLED = {"cache": "KvCache", "layout": "KvLayout", "stats": "TransferStats", "descriptor": "RegionDescriptor"}

Arguments: TypeAlias = list[str] | None


@cache
def exported() -> set[str]:
    """The names that users import from `pdkv`."""
    for node in ast.parse((ROOT / "python/pdkv/__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    raise AssertionError("`pdkv` has no `__all__`")


def arguments(function: ast.FunctionDef) -> list[str]:
    """The arguments as they are written, without types and defaults."""
    given = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args) if arg.arg not in ("self", "cls")]
    named = [arg.arg for arg in function.args.kwonlyargs]
    return [*given, *(["*", *named] if named else [])]


@cache
def stub() -> dict[str, dict[str, Arguments]]:
    """The public members of each public class: arguments, or `None` of a property. Functions are under `pdkv`."""
    found: dict[str, dict[str, Arguments]] = {"pdkv": {}}
    for node in ast.parse((ROOT / "python/pdkv/_core.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name in exported():
            found["pdkv"][node.name] = arguments(node)
        if isinstance(node, ast.ClassDef) and node.name in exported():
            members = found.setdefault(node.name, {})
            for member in (each for each in node.body if isinstance(each, ast.FunctionDef)):
                if member.name == "__new__":
                    members[""] = arguments(member)
                elif not member.name.startswith("_"):
                    is_property = any(ast.unparse(each) == "property" for each in member.decorator_list)
                    members[member.name] = None if is_property else arguments(member)
    return found


@cache
def page() -> dict[tuple[str, str], Arguments]:
    """What the first columns of its tables name: (class, member), with the arguments if there are any."""
    classes = {name.lower(): name for name in stub()} | CALLED | {name: name for name in stub()}
    found: dict[tuple[str, str], Arguments] = {}
    for cell in re.findall(r"^\| (.*?) \| ", PAGE.read_text(), re.MULTILINE):
        subject = None
        for text in re.findall(r"`([^`]*)`", cell):
            named = re.fullmatch(r"(\w*)(?:\.(\w+))?(?:\((.*)\))?", text)
            if named is None or (not named[1] and not named[2]):
                continue
            subject = classes.get(named[1]) if named[1] else subject
            if subject is None or not (named[2] or named[3]):
                continue
            given = None if named[3] is None else [each.strip() for each in named[3].split(",") if each.strip()]
            found[subject, named[2] or ""] = given
    return found


MEMBERS = [pytest.param(*key, id=".".join(key)) for key in sorted((c, m) for c, names in stub().items() for m in names)]


def test_the_stub_and_the_page_are_read():
    assert {"Engine", "KvCache", "Peer", "Plan", "TransferStats"} <= stub().keys()
    assert stub()["Engine"]["connect"] == ["address", "*", "timeout_s"] == page()["Engine", "connect"]
    assert stub()["Peer"]["alive"] is None
    assert ("Peer", "notify") in page()


@pytest.mark.parametrize(("owner", "member"), MEMBERS)
def test_the_page_names_it_as_it_is(owner, member):
    assert (owner, member) in page(), f"{PAGE.name} lacks `{owner}.{member}`"
    assert page()[owner, member] == stub()[owner][member]


def test_the_page_names_nothing_that_there_is_not():
    assert not [key for key in page() if key[1] not in stub()[key[0]]]


def test_every_setting_of_an_engine_has_a_row():
    settings = PAGE.read_text().partition("### Settings\n")[2].partition("\n\nA bad value")[0]
    rows = set(re.findall(r"^\| `(\w+)` \|", settings, re.MULTILINE))
    assert rows == set(stub()["Engine"][""]) - {"name", "*"}
