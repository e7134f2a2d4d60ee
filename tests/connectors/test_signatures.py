"""The connector's hooks can be called as each supported release of vLLM calls them.

Compares what is written in `pdkv.connectors` with what is known of each release; neither vLLM nor the connector is
imported.
"""

from __future__ import annotations

import ast
import inspect

import pytest

from connectors.releases import RELEASES, abstract, declared, facts, ours

pytestmark = pytest.mark.parametrize("release", RELEASES)

PAIRS = [(name, base) for name, (bases, _) in ours().items() for base in bases]
# What arguments of hooks are called here and in vLLM, and of which class they are.
ARGUMENTS = {
    "request": ("Request", {"is_finished"}),
    "connector_output": ("KVConnectorOutput", set()),
    "scheduler_output": ("SchedulerOutput", set()),
    "blocks": ("KVCacheBlocks", {"get_block_ids"}),
}


def test_the_connector_is_among_the_classes_that_are_compared(release: str) -> None:
    assert {("PdkvConnector", "KVConnectorBase_V1"), ("PdkvConnector", "SupportsHMA")} <= set(PAIRS)


@pytest.mark.parametrize(("name", "base"), PAIRS)
def test_what_the_release_demands_is_defined(release: str, name: str, base: str) -> None:
    assert abstract(release, base) <= set(ours()[name][1])


@pytest.mark.parametrize(("name", "base"), PAIRS)
def test_hooks_take_what_the_release_declares(release: str, name: str, base: str) -> None:
    mine = ours()[name][1]
    for hook, theirs in declared(release, base).items():
        if hook not in mine:
            continue
        assert mine[hook].kind == theirs.kind, hook
        parameters = theirs.signature.parameters.values()
        plain = [parameter for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
        _bind(hook, mine[hook].signature, len(plain), {})
        _bind(hook, mine[hook].signature, 0, {parameter.name: None for parameter in plain})
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            _bind(hook, mine[hook].signature, len(plain), {"one_more": None})


@pytest.mark.parametrize(("name", "base"), PAIRS)
def test_hooks_take_what_the_engine_passes(release: str, name: str, base: str) -> None:
    mine, theirs = ours()[name][1], declared(release, base)
    for hook, ways in facts(release)["calls"].items():
        if hook not in mine or hook not in theirs or mine[hook].kind == "property":
            continue
        for way in ways:
            positions, *keywords = way.split()
            named = {"one_more" if keyword == "**" else keyword: None for keyword in keywords}
            _bind(hook, mine[hook].signature, int(positions), named)


@pytest.mark.parametrize(("name", "base"), PAIRS)
def test_every_public_method_is_a_hook_of_some_release(release: str, name: str, base: str) -> None:
    bases = ours()[name][0]
    hooks = {hook for known in RELEASES for cls in bases for hook in declared(known, cls)}
    assert {method for method in ours()[name][1] if not method.startswith("_")} <= hooks


def test_what_hooks_read_of_their_arguments_is_there(release: str) -> None:
    read = set()
    for _, methods in ours().values():
        for method in methods.values():
            assert method.node is not None
            for node in ast.walk(method.node):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ARGUMENTS:
                    read.add((node.value.id, node.attr))
    assert ("request", "request_id") in read
    for argument, attribute in read:
        cls, methods = ARGUMENTS[argument]
        has = {*facts(release)["fields"].get(cls, ()), *facts(release)["classes"].get(cls, {}), *methods}
        assert attribute in has, f"{cls} of {release} has no `{attribute}`"


def _bind(hook: str, signature: inspect.Signature, positions: int, named: dict[str, None]) -> None:
    try:
        signature.bind(*[None] * positions, **named)
    except TypeError as error:
        pytest.fail(f"`{hook}{signature}` can't be called with {positions} positions and {list(named)}: {error}")
