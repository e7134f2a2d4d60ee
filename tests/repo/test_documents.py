"""Documents say what exists: links resolve, commands are real, settings are described, decisions are numbered."""

from __future__ import annotations

import re
import subprocess
import tomllib

import pytest

from repo.tree import ROOT, files, name, under

PAGES = [pytest.param(path, id=name(path)) for path in files(".md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(text: str) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors a reader can jump to, as repository hosts make them from headings."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    broken = []
    for target in LINK.findall(prose(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text())):
            broken.append(target)
    assert not broken, broken


def make_targets() -> dict[str, str]:
    """The targets of `make help` with their texts."""
    listing = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return {line.split()[0]: " ".join(line.split()[1:]) for line in listing.splitlines()}


def test_every_documented_make_target_exists():
    wanted = {
        target
        for path in files(".md")
        for target in re.findall(r"(?:^|`)\s*make ([a-z][a-z-]*)", path.read_text(), re.MULTILINE)
    }
    makefile = (ROOT / "Makefile").read_text()
    missing = {target for target in wanted if not re.search(rf"^{target}:", makefile, re.MULTILINE)}
    assert {"demo", "test", "help"} <= wanted
    assert not missing


def test_make_help_explains_the_main_targets():
    targets = make_targets()
    assert {"help", "venv", "build", "demo", "test", "test-fast", "check", "bench", "fmt", "clean"} <= targets.keys()
    assert all(len(text) > 10 for text in targets.values())


def test_readme_shows_the_example_that_is_tested():
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    example = (ROOT / "examples/two_processes.py").read_text()
    assert blocks, "README.md has no Python example"
    assert blocks[0] == example, "README.md and examples/two_processes.py differ"


def test_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text
    assert "make test" in text


def test_changelog_has_an_unreleased_section_with_content():
    text = (ROOT / "CHANGELOG.md").read_text()
    section = text.partition("## Unreleased\n")[2].partition("\n## ")[0]
    assert re.search(r"^### (?:Added|Changed|Fixed|Performance)$", section, re.MULTILINE)
    assert re.search(r"^- ", section, re.MULTILINE)


def test_environment_variables_are_documented_and_exist():
    variable = re.compile(r"\bPDKV_[A-Z][A-Z0-9_]*\b")
    page = ROOT / "docs/reference/environment.md"
    used = {
        word
        for folder in ("python", "rust", "benches")
        for path in under(folder, ".py", ".rs", ".toml")
        if "tests" not in path.parts  # what a test tells its own child process is nobody's setting
        for word in variable.findall(path.read_text())
    }
    told = set(variable.findall(page.read_text()))
    assert used <= told
    readers = [ROOT / "Makefile", *under("tests", ".py"), *under("rust", ".rs")]
    read = {word for path in readers for word in variable.findall(path.read_text())}
    assert told <= used | read, "what nothing reads is no setting"


def test_decisions_are_numbered_without_gaps_and_say_why():
    pages = sorted(path for path in under("docs/decisions", ".md") if path.name != "README.md")
    assert [int(path.name[:4]) for path in pages] == list(range(1, len(pages) + 1))
    for page in pages:
        for heading in ("## Context", "## Choice", "## Rejected", "## Consequences"):
            assert heading in page.read_text(), f"{name(page)} has no `{heading}`"


def test_decisions_are_listed():
    index = (ROOT / "docs/decisions/README.md").read_text()
    for page in under("docs/decisions", ".md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def test_every_docs_page_can_be_reached_from_the_index():
    reached, todo = set(), [ROOT / "docs/index.md"]
    while todo:
        page = todo.pop()
        if page in reached:
            continue
        reached.add(page)
        targets = (target.partition("#")[0] for target in LINK.findall(page.read_text()))
        todo += [(page.parent / target).resolve() for target in targets if target.endswith(".md") and ":" not in target]
    lost = [name(path) for path in under("docs", ".md") if path not in reached]
    assert not lost, f"nobody links to {lost}"


def test_one_version_for_crates_and_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" in project["dynamic"], "the wheel takes its version from the workspace"


def test_development_tools_include_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {re.split(r"[<>=~!]", line)[0] for line in lines} for extra, lines in extras.items()}
    assert names["bench"] <= names["dev"]
