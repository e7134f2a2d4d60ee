"""The exception tree: facts, bases, pickling, and agreement with the Rust table."""

from __future__ import annotations

import inspect
import pickle

import pytest

import pdkv
from pdkv import _core, errors

CLASSES = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.PdkvError)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_pickle_keeps_every_fact(cls: type[errors.PdkvError]) -> None:
    error = cls(
        "block `7` is out of range",
        scope="engine",
        retryable=True,
        operation="pull",
        context={"peer": "p"},
        hint="use fewer blocks",
    )
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is cls
    assert vars(back) == vars(error)
    assert str(back) == "pull: block `7` is out of range\n\nhint: use fewer blocks"


@pytest.mark.parametrize(("kind", "slug", "cls", "scope", "retryable"), _core.error_kinds())
def test_rust_kinds_match_their_class(kind: str, slug: str, cls: str, scope: str, retryable: bool) -> None:
    python = getattr(errors, cls)
    assert (python.kind, python.scope, python.retryable) == (slug, scope, retryable), kind


def test_every_concrete_class_is_some_rust_kind() -> None:
    named = {row[2] for row in _core.error_kinds()}
    abstract = {"PdkvError", "PeerError", "StaleReferenceError", "ReferenceMismatchError"}
    assert {c.__name__ for c in CLASSES} - named == abstract


@pytest.mark.parametrize(
    ("cls", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.LayoutError, ValueError),
        (errors.TransferTimeoutError, TimeoutError),
        (errors.PeerLostError, ConnectionError),
        (errors.HandshakeError, ConnectionError),
    ],
)
def test_builtin_bases(cls: type[errors.PdkvError], builtin: type[Exception]) -> None:
    assert issubclass(cls, builtin)


def test_all_names_are_exported_from_the_package() -> None:
    for name in errors.__all__:
        assert getattr(pdkv, name) is getattr(errors, name)
