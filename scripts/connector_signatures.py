"""Extracts what a release of vLLM lets a KV connector define and how it calls that, as facts in JSON.

    python scripts/connector_signatures.py TREE > tests/connectors/signatures/0.32.0.json

`TREE` is the folder that holds the package `vllm`, such as an unpacked wheel. Names of methods, parameters and fields,
what is abstract or has a default, and with how many arguments the engine calls them: nothing else of the sources gets
into the output. It parses and never imports, so neither vLLM nor torch has to be there, and it knows nothing of pdkv.

A parameter is spelled `name`, `name=` if it has a default, `*name` if it goes by keyword only, `*` and `**` if it takes
what is left over. A call is spelled by its number of positions and the keywords it names.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
METRICS = "distributed/kv_transfer/kv_connector/v1/metrics.py"
CLASSES = {
    "KVConnectorBase_V1": BASE,
    "SupportsHMA": BASE,
    "KVConnectorWorkerMetadata": BASE,
    "KVConnectorStats": METRICS,
    "KVConnectorPromMetrics": METRICS,
    "KVConnectorFactory": "distributed/kv_transfer/kv_connector/factory.py",
    "KVCacheBlocks": "v1/core/kv_cache_manager.py",
}
# What instances have: the fields of data classes, and what constructors set.
FIELDS = {
    "KVConnectorTransferResults": BASE,
    "KVConnectorOutput": "v1/outputs.py",
    "KVTransferConfig": "config/kv_transfer.py",
    "KVCacheConfig": "v1/kv_cache_interface.py",
    "KVCacheGroupSpec": "v1/kv_cache_interface.py",
    "SchedulerOutput": "v1/core/sched/output.py",
    "LoRARequest": "lora/request.py",
    "MultiModalFeatureSpec": "multimodal/inputs.py",
    "Request": "v1/request.py",
}
ENUMS = {"KVConnectorRole": BASE, "RequestStatus": "v1/request.py"}
# Where the engine calls connectors. Those of encoder caches and of auxiliary outputs are others.
CALLERS = (
    "v1/**/*.py",
    "config/*.py",
    "model_executor/layers/attention/*.py",
    "distributed/kv_transfer/kv_connector/utils.py",
    METRICS,
)
RECEIVER = re.compile(r"\b(kv_connector|connector|connector_cls|kv_transfer_group|get_kv_transfer_group\(\))$")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def find_class(tree: Path, file: str, name: str) -> ast.ClassDef | None:
    """Returns the class of that name in a file, if both are there."""
    if not (tree / file).is_file():
        return None
    module = ast.parse((tree / file).read_text(encoding="utf-8"))
    return next((node for node in module.body if isinstance(node, ast.ClassDef) and node.name == name), None)


def marks(node: Function) -> set[str]:
    """Returns the last names of a function's decorators."""
    plain = (mark.func if isinstance(mark, ast.Call) else mark for mark in node.decorator_list)
    return {ast.unparse(mark).rsplit(".", 1)[-1] for mark in plain}


def parameters(node: Function) -> list[str]:
    """Returns how each parameter but the first, `self` or `cls`, is spelled."""
    args = node.args
    positional = args.posonlyargs + args.args
    without_default = len(positional) - len(args.defaults)
    spelled = [arg.arg + ("=" if at >= without_default else "") for at, arg in enumerate(positional)]
    if "staticmethod" not in marks(node):
        del spelled[0]
    if args.vararg:
        spelled.append("*")
    for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        spelled.append(f"*{arg.arg}" + ("" if default is None else "="))
    return [*spelled, "**"] if args.kwarg else spelled


def methods(cls: ast.ClassDef) -> dict[str, dict[str, object]]:
    """Returns the parameters of each method, with its kind and whether it is abstract where that is worth saying."""
    found: dict[str, dict[str, object]] = {}
    for node in cls.body:
        if not isinstance(node, Function) or "overload" in marks(node):
            continue
        about: dict[str, object] = {"parameters": parameters(node)}
        kind = marks(node) & {"classmethod", "staticmethod", "property"}
        if kind:
            about["kind"] = kind.pop()
        if "abstractmethod" in marks(node):
            about["abstract"] = True
        found[node.name] = about
    return found


def fields(cls: ast.ClassDef) -> list[str]:
    """Returns the names of what an instance has: annotated in the body, set by the constructor, or a property."""
    names = {
        node.target.id for node in cls.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    functions = [node for node in cls.body if isinstance(node, Function)]
    names |= {node.name for node in functions if "property" in marks(node)}
    names |= {
        node.attr
        for function in functions
        if function.name == "__init__"
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return sorted(names)


def members(cls: ast.ClassDef) -> list[str]:
    """Returns the members of an enumeration."""
    targets = (target for node in cls.body if isinstance(node, ast.Assign) for target in node.targets)
    return [target.id for target in targets if isinstance(target, ast.Name) and not target.id.startswith("_")]


def files(tree: Path) -> Iterator[Path]:
    """Yields the files that may call a connector."""
    for pattern in CALLERS:
        yield from sorted(tree.glob(pattern))


def calls(tree: Path, hooks: set[str]) -> dict[str, list[str]]:
    """Returns for each hook the distinct ways in which the engine calls it."""
    found: dict[str, set[str]] = {}
    for path in files(tree):
        text = path.read_text(encoding="utf-8")
        if "connector" not in text and "get_kv_transfer_group" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in hooks):
                continue
            if RECEIVER.search(ast.unparse(node.func.value)):
                keywords = [keyword.arg if keyword.arg else "**" for keyword in node.keywords]
                found.setdefault(node.func.attr, set()).add(" ".join([str(len(node.args)), *keywords]))
    return {hook: sorted(ways) for hook, ways in sorted(found.items())}


def version(tree: Path) -> str:
    """Returns the version that the package states, without the local part."""
    text = (tree / "_version.py").read_text(encoding="utf-8")
    match = re.search(r"^__version__\b.*?= '([0-9][0-9a-z.]*)", text, re.MULTILINE)
    if match is None:
        sys.exit(f"no version in `{tree / '_version.py'}`")
    return match[1]


def facts(tree: Path) -> dict[str, object]:
    """Returns everything this script knows to say of the package in folder `tree`."""

    def each(where: dict[str, str]) -> Iterator[tuple[str, ast.ClassDef]]:
        found = ((name, find_class(tree, file, name)) for name, file in where.items())
        return ((name, cls) for name, cls in found if cls is not None)

    classes = {name: methods(cls) for name, cls in each(CLASSES)}
    hooks = {name for cls in ("KVConnectorBase_V1", "SupportsHMA") for name in classes.get(cls, {})}
    return {
        "release": version(tree),
        "classes": classes,
        "fields": {name: fields(cls) for name, cls in each(FIELDS)},
        "enums": {name: members(cls) for name, cls in each(ENUMS)},
        "calls": calls(tree, hooks),
    }


def text(value: dict[str, object]) -> str:
    """Returns JSON with one line for each method, so that releases can be compared by `diff`."""
    sections = []
    for name, section in value.items():
        if not isinstance(section, dict):
            sections.append(f"{json.dumps(name)}: {json.dumps(section)}")
            continue
        rows = []
        for key, about in section.items():
            inner = (
                [f"    {json.dumps(item)}: {json.dumps(facts)}" for item, facts in about.items()]
                if name == "classes"
                else []
            )
            rows.append(
                f"  {json.dumps(key)}: " + ("{\n" + ",\n".join(inner) + "\n  }" if inner else json.dumps(about))
            )
        sections.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def main() -> None:
    """Prints the facts of the tree named on the command line."""
    if len(sys.argv) != 2:
        sys.exit("usage: connector_signatures.py TREE, where TREE holds the package `vllm`")
    sys.stdout.write(text(facts(Path(sys.argv[1]) / "vllm")))


if __name__ == "__main__":
    main()
