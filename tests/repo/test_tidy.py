"""Small rules over the whole tree: file lengths, loose ends, dangerous calls, paths of one machine."""

from __future__ import annotations

import ast
import re
import warnings

import pytest

from repo.tree import ROOT, files, name, under

CODE = (".rs", ".py", ".pyi", ".cu", ".cuh", ".h", ".c", ".cpp")
SOFT, HARD = 500, 800

# Files past the soft limit, each with the reason why it is one concept. Keep this short.
LONG_FOR_A_REASON: dict[str, str] = {
    "python/pdkv/_core.pyi": "one native module has one stub",
}


def test_no_file_is_too_long():
    lengths = {name(path): len(path.read_text().splitlines()) for path in files(*CODE)}
    too_long = {path: lines for path, lines in lengths.items() if lines > HARD}
    assert not too_long, f"over {HARD} lines: {too_long}"
    unexplained = {path: n for path, n in lengths.items() if n > SOFT and path not in LONG_FOR_A_REASON}
    assert not unexplained, f"over {SOFT} lines; is there a second concept in it? {unexplained}"
    stale = [path for path in LONG_FOR_A_REASON if lengths.get(path, 0) <= SOFT]
    assert not stale, f"no longer long: {stale}"


def test_loose_ends_carry_an_issue_number():
    mark = re.compile(r"\b(?:TO[D]O|FIX[M]E|XX[X])\b(?!\(#\d+\))")
    ends = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in files(*CODE, ".toml", ".md")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if mark.search(line) and not path.is_relative_to(ROOT / "tests/repo") and path.name != "CONTRIBUTING.md"
    ]
    assert not ends, f"name the issue, as in (#12) after the mark, or do it: {ends}"


def test_nothing_is_left_unimplemented_or_ignored():
    words = re.compile(r"\b(?:unimplemented|todo)!|#\[ignore|\bNotImplementedError\b")
    found = [
        f"{name(path)}:{number}"
        for folder in ("rust", "python", "tests", "cuda")
        for path in under(folder, *CODE)
        if not path.is_relative_to(ROOT / "tests/repo")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert not found, found


def _dangerous(tree: ast.AST) -> list[tuple[int, str]]:
    banned_modules = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names if alias.name.split(".")[0] in banned_modules]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in banned_modules:
            found.append((node.lineno, node.module or ""))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
            found.append((node.lineno, node.func.id))
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append((node.value.lineno, "allow_pickle"))
    return found


@pytest.mark.parametrize("path", [pytest.param(path, id=name(path)) for path in under("python", ".py")])
def test_library_never_unpickles_or_evaluates(path):
    assert not _dangerous(ast.parse(path.read_text()))


def test_the_check_for_dangerous_calls_sees_them():
    bad = "import pickle\nfrom dill import loads\neval('1')\nnp.load(f, allow_pickle=True)\n"
    assert [line for line, _ in _dangerous(ast.parse(bad))] == [1, 2, 3, 4]


def test_no_path_of_one_machine_is_tracked():
    path_of_a_machine = re.compile(r"(?<![\w.])/(?:wor[k]|roo[t]|home/[a-z]+|Users/[A-Za-z]+)/")
    found = [
        f"{name(path)}:{number}: {line.strip()[:100]}"
        for path in files()
        if path.suffix not in {".lock", ".png", ".svg"}
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if path_of_a_machine.search(line)
    ]
    assert not found, found


# A type and the name that it gives a pointer: in a cast no name follows, and in a product no type comes before.
POINTER = re.compile(r"\b(?:u32|u64|char|void|T|Bytes\d+|FastDiv|Lane|Tile|View)\s*\*\s*(?:const\s+)?(?=[A-Za-z_])")


def _pointers_without_shape(text: str) -> list[str]:
    found = []
    for line in text.splitlines():
        code, _, comment = line.partition("//")
        if POINTER.search(code) and not re.search(r"\[.+\]", comment):
            found.append(line.strip())
    return found


def test_every_pointer_of_a_kernel_says_its_shape():
    found = {name(path): _pointers_without_shape(path.read_text()) for path in under("cuda", ".cu", ".cuh")}
    assert len(found) > 5
    assert not any(found.values()), f"what is behind a pointer stands in brackets on its line: {found}"


def test_the_check_for_shapes_sees_pointers():
    bad = [
        "u64 *flag;",
        "const Lane *const lanes = view.lanes;",
        "int f(void *to, u32 n) {  // to",
        "unsigned char *f() {",
    ]
    assert _pointers_without_shape("\n".join(bad)) == bad
    good = [
        "u64 *flag;  // [1]",
        "*reinterpret_cast<const T *>(from) * 2;",
        "static_cast<u64>(n) * by",
        "// a u64 *flag",
    ]
    assert _pointers_without_shape("\n".join(good)) == []


def test_python_parses_without_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for path in files(".py", ".pyi"):
            compile(path.read_text(), name(path), "exec")
