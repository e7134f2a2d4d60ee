"""The facts about vLLM's releases that lie in `signatures/`, for tests. Needs no vLLM."""

from __future__ import annotations

import ast
import inspect
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SIGNATURES = Path(__file__).parent / "signatures"
CONNECTORS = Path(__file__).parents[2] / "python" / "pdkv" / "connectors"


def number(release: str) -> tuple[int, ...]:
    """A release as a number that can be compared."""
    return tuple(int(part) for part in release.split("."))


RELEASES = sorted((path.stem for path in SIGNATURES.glob("*.json")), key=number)


@cache
def facts(release: str) -> Any:
    """What is known of a release."""
    return json.loads((SIGNATURES / f"{release}.json").read_text())


@dataclass(frozen=True)
class Method:
    """A method as it is written.

    Attributes:
        kind: `method`, `classmethod`, `staticmethod` or `property`.
        signature: Its parameters but for `self` or `cls`.
        node: Where it is written, if it is ours.
    """

    kind: str
    signature: inspect.Signature
    node: ast.FunctionDef | None = None


def declared(release: str, cls: str) -> dict[str, Method]:
    """The methods of one of vLLM's classes, by name; none if the release hasn't the class."""
    methods = facts(release)["classes"].get(cls, {})
    return {
        name: Method(about.get("kind", "method"), _signature(about["parameters"])) for name, about in methods.items()
    }


def abstract(release: str, cls: str) -> set[str]:
    """The methods that whoever derives from one of vLLM's classes must define."""
    return {name for name, about in facts(release)["classes"].get(cls, {}).items() if about.get("abstract")}


@cache
def ours() -> dict[str, tuple[list[str], dict[str, Method]]]:
    """Classes of ours that derive from vLLM's, with their bases there and their own methods. Read, not imported."""
    found: dict[str, tuple[list[str], dict[str, Method]]] = {}
    known = {cls for release in RELEASES for cls in facts(release)["classes"]}
    for path in sorted(CONNECTORS.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                bases = [
                    base for base in (ast.unparse(base).rsplit(".", 1)[-1] for base in node.bases) if base in known
                ]
                if bases:
                    functions = [item for item in node.body if isinstance(item, ast.FunctionDef)]
                    found[node.name] = (bases, {function.name: _written(function) for function in functions})
    return found


def _signature(spelled: list[str]) -> inspect.Signature:
    kinds = inspect.Parameter
    parameters = []
    for text in spelled:
        name = text.strip("*").removesuffix("=")
        if text == "*":
            parameter = kinds("args", kinds.VAR_POSITIONAL)
        elif text == "**":
            parameter = kinds("kwargs", kinds.VAR_KEYWORD)
        else:
            kind = kinds.KEYWORD_ONLY if text.startswith("*") else kinds.POSITIONAL_OR_KEYWORD
            parameter = kinds(name, kind, default=None if text.endswith("=") else kinds.empty)
        parameters.append(parameter)
    return inspect.Signature(parameters)


def _written(node: ast.FunctionDef) -> Method:
    args = node.args
    positional = args.posonlyargs + args.args
    required = len(positional) - len(args.defaults)
    spelled = [arg.arg + ("=" if at >= required else "") for at, arg in enumerate(positional)]
    spelled += ["*"] if args.vararg else []
    spelled += [
        f"*{arg.arg}" + ("" if default is None else "=")
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    spelled += ["**"] if args.kwarg else []
    marks = {ast.unparse(mark).rsplit(".", 1)[-1] for mark in node.decorator_list}
    kind = next(iter(marks & {"classmethod", "staticmethod", "property"}), "method")
    return Method(kind, _signature(spelled if kind == "staticmethod" else spelled[1:]), node)
