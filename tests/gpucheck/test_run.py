"""Steps in processes of their own: deadlines, crashes, the budget, and what is made of what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import struct
import sys
import time
import tomllib
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path

import pytest
from gpu_check import floors, picture, png, report, run, speed, wheel
from gpu_check.__main__ import BUDGET_S
from gpu_check.arena import DRY
from gpu_check.outcome import FAILED, PASSED, SKIPPED, Outcome, StepFailedError, StepSkippedError
from gpu_check.steps import PLANNED, STEPS, Step

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Makes the child of a step run a script instead."""

    def use(script):
        (tmp_path / "gpu_check").mkdir()
        (tmp_path / "gpu_check/__init__.py").write_text("")
        (tmp_path / "gpu_check/__main__.py").write_text(script)
        return {"PYTHONPATH": str(tmp_path)}

    return use


STEP = Step("machine", "machine")


def test_a_step_that_answers_is_believed(child):
    said = json.dumps(Outcome(text="well").to_json())
    environment = child(f"print('noise'); print({run.MARK!r} + {said!r}); print('more noise')")
    assert run.start(STEP, 60, environment) == Outcome(text="well")


def test_a_step_that_crashes_is_a_failure_with_its_last_words(child):
    outcome = run.start(STEP, 60, child("import os\nprint('last words', flush=True)\nos.abort()"))
    assert (outcome.state, outcome.facts) == (FAILED, {"printed": ["last words"]})
    assert "ended with -6" in outcome.text


def test_a_step_that_hangs_costs_its_deadline_and_leaves_nobody(child, tmp_path):
    # A grandchild holds the pipe too: only killing the whole session ends the reading.
    script = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    outcome = run.start(STEP, 3, child(script))
    assert outcome.state == FAILED
    assert "longer than 3 s" in outcome.text


def test_what_a_step_leaves_behind_is_ended(child, tmp_path):
    said = json.dumps(Outcome(text="well").to_json())
    script = (
        "import subprocess, sys\n"
        "silent = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'], **silent)\n"
        f"open({str(tmp_path / 'left')!r}, 'w').write(str(left.pid))\n"
        f"print({run.MARK!r} + {said!r})"
    )
    assert run.start(STEP, 60, child(script)).text == "well"
    stat = Path("/proc", (tmp_path / "left").read_text(), "stat")
    # Whoever inherits it may look at it at any moment, or not have looked at it yet.
    with suppress(FileNotFoundError, ProcessLookupError):
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)


def test_a_step_that_can_not_be_killed_is_left_behind(child, monkeypatch):
    # As one that the driver holds in a call: the others still have their turn.
    monkeypatch.setattr(run.os, "killpg", lambda group, signal: None)
    monkeypatch.setattr(run, "_DYING_S", 0.5)
    outcome = run.start(STEP, 3, child("import time\ntime.sleep(1000)"))
    assert outcome.state == FAILED
    assert outcome.facts == {"printed": ["what it started does not die: the driver holds it"]}
    with run._left.pop() as process:
        process.kill()


def test_a_step_that_fails_also_tells_what_it_printed(child):
    said = json.dumps(Outcome(FAILED, "a byte is wrong").to_json())
    outcome = run.start(STEP, 60, child(f"print('a warning'); print({run.MARK!r} + {said!r})"))
    assert (outcome.text, outcome.facts) == ("a byte is wrong", {"printed": ["a warning"]})


def test_what_a_step_raises_is_its_outcome(monkeypatch):
    raised = []

    class Stub(Step):
        def load(self):
            def function(_budget):
                raise raised[-1]

            return function

    for error, state, text in (
        (StepSkippedError("can't import it", "NIXL"), SKIPPED, "can't import it"),
        (StepFailedError("a byte is wrong"), FAILED, "a byte is wrong"),
        (KeyError("x"), FAILED, "KeyError: 'x'"),
    ):
        raised.append(error)
        outcome = run.answer(Stub("machine", "machine"), 1)
        assert (outcome.state, outcome.text) == (state, text)
        assert outcome.absent == getattr(error, "absent", [])


def test_the_budget_ends_a_run_and_says_so(monkeypatch):
    asked = []

    def start(step, timeout_s, environment):
        asked.append((step.name, timeout_s))
        return Outcome()

    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(run, "start", start)
    monkeypatch.setattr(run.time, "monotonic", lambda: next(clock))
    steps = [Step(name, "machine", timeout_s=40) for name in ("a", "b", "c")]
    found = run.run([], 70, {}, lambda *_: None, steps)
    assert asked == [("a", 40), ("b", 30)], "the second gets what is left"
    assert [step["state"] for step in found.values()] == [PASSED, PASSED, FAILED]
    assert "70 s for all steps are over" in found["c"]["text"]


def test_a_dry_run_out_of_budget_skips(monkeypatch):
    found = run.run([], 1, {}, lambda *_: None, [Step("a", "machine")], late=SKIPPED)
    assert [step["state"] for step in found.values()] == [SKIPPED]


def test_what_must_be_shown_comes_first_and_fits_into_the_budget_and_that_into_eight_minutes():
    first = [step.name for step in STEPS[: [step.name for step in STEPS].index("nixl") + 1]]
    assert {"kernels", "plans", "speed", "two processes", "posting", "sanitizer"} < set(first)
    assert sum(step.timeout_s * PLANNED for step in STEPS if step.name in first) <= BUDGET_S
    assert BUDGET_S + run._DYING_S + 15 < 480, "the picture takes some seconds too"


def test_what_is_known_is_told_after_each_step(monkeypatch):
    told = []
    monkeypatch.setattr(run, "start", lambda step, timeout_s, environment: Outcome(text=step.name))
    steps = [Step(name, "machine") for name in ("a", "b")]
    run.run([], 1000, {}, lambda found, name, outcome, seconds: told.append((sorted(found), name)), steps)
    assert told == [(["a"], "a"), (["a", "b"], "b")]


def test_a_run_that_is_ended_leaves_what_it_knows(monkeypatch, tmp_path):
    from gpu_check import __main__ as command

    def start(step, timeout_s, environment):
        if step.name == "kernels":
            raise KeyboardInterrupt
        return Outcome(text="a machine")

    monkeypatch.setattr(run, "start", start)
    monkeypatch.setattr(wheel, "check_machine", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path), "--only", "machine,kernels"])
    with pytest.raises(KeyboardInterrupt):
        command.main()
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert not found["good"]
    assert found["steps"]["machine"]["text"] == "a machine"
    assert found["steps"]["the run"]["text"] == "it has not come to its end"


def test_a_dry_run_is_patient(monkeypatch):
    asked = []
    monkeypatch.setattr(run, "start", lambda step, timeout_s, environment: asked.append(timeout_s) or Outcome())
    run.run([], 1000, {}, lambda *_: None, [Step("a", "machine", timeout_s=40)], patience=6)
    assert asked == [240]


def test_the_guide_says_which_steps_a_dry_run_has(monkeypatch):
    told = (ROOT / "docs/guides/gpu.md").read_text()
    run_dry = told.split("each step in a process: ")[1].split(".")[0].replace("`", "").split(", ")
    skipped = told.split("the other six need torch and say so (")[1].split(")")[0].lower().split(", ")
    steps = {step.name: step for step in STEPS if not step.hidden}
    assert sorted([*run_dry, *skipped]) == sorted(steps)
    assert (len(steps), len(skipped)) == (17, 6), "in words in the guide"
    monkeypatch.setenv(DRY, "1")
    for name in skipped:
        with pytest.raises(StepSkippedError) as raised:
            steps[name].load()(1)
        assert raised.value.absent == [], "the machine lacks nothing"


def test_every_step_has_a_name_of_its_own_and_a_function():
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert callable(step.load())


def steps_with(fraction_16, fraction_4, times_loop, growth):
    rows = [
        {"block_bytes": 4096, "fraction": fraction_4, "limit_gb_s": 2000.0, "kernel_gb_s": 2000.0 * fraction_4},
        {
            "block_bytes": 16384,
            "fraction": fraction_16,
            "times_loop": times_loop,
            "limit_gb_s": 2000.0,
            "kernel_gb_s": 2000.0 * fraction_16,
            "wrong": 0,
        },
    ]
    return {
        "speed": {"state": PASSED, "rows": rows},
        "posting": {"state": PASSED, "facts": {"growth": growth}},
        "nixl": {
            "state": PASSED,
            "rows": [{"block_bytes": 4096, "nixl_gb_s": 3.25, "once_gb_s": 6.5, "times_nixl": 2.0}],
            "facts": {"total_bytes": 64 << 20},
        },
    }


@pytest.mark.parametrize(
    ("measured", "kept"),
    [
        ((0.9, 0.7, 25.0, 1.1), [True, True, True, True]),
        ((0.84, 0.59, 19.9, 1.6), [False, False, False, False]),
        ((0.85, 0.6, 20.0, 1.5), [True, True, True, True]),
    ],
)
def test_floors_are_judged_at_their_bounds(measured, kept):
    steps = steps_with(*measured)
    judged = floors.judge(steps, dry=False, whole=True)
    assert [floor.kept for floor in judged] == kept
    assert report.good(steps, judged, dry=False) == all(kept)
    dry = floors.judge(steps, dry=True, whole=True)
    assert all(floor.kept is None for floor in dry), "a dry run has no speed"
    assert report.good(steps, dry, dry=True)


def test_what_some_steps_did_not_measure_is_not_judged_and_a_failed_step_is_not_good():
    judged = floors.judge({}, dry=False, whole=False)
    assert [floor.kept for floor in judged] == [None] * 4
    assert not report.good({}, judged, dry=False), "nothing passed"
    assert report.good({"kernels": {"state": PASSED}}, judged, dry=False)
    assert not report.good({"kernels": {"state": PASSED}, "plans": {"state": FAILED}}, judged, dry=False)
    assert "not measured" in report.floors(judged)
    missed = report.floors(floors.judge(steps_with(0.5, 0.7, 25, 1), dry=False, whole=True))
    assert missed.splitlines()[0].startswith("MISSED")


def test_a_run_of_all_steps_that_measured_no_speed_is_not_good():
    judged = floors.judge({}, dry=False, whole=True)
    assert [floor.kept for floor in judged] == [False] * 4
    assert not report.good({"kernels": {"state": PASSED}}, judged, dry=False)
    assert report.floors(judged).splitlines()[0].startswith("MISSED")


def test_only_what_the_machine_lacks_may_be_skipped_and_it_is_named():
    steps = steps_with(0.9, 0.7, 25.0, 1.1)
    judged = floors.judge(steps, dry=False, whole=True)
    steps["nixl"] = {"state": SKIPPED, "text": "can't be imported", "absent": ["NIXL"]}
    steps["two processes"] = {"state": PASSED, "absent": ["a second GPU"]}
    steps["one process"] = {"state": PASSED, "absent": ["a second GPU"]}
    assert report.good(steps, judged, dry=False)
    assert report.without(steps) == ["NIXL", "a second GPU"]
    steps["staged"] = {"state": SKIPPED, "text": "for some reason", "absent": []}
    assert not report.good(steps, judged, dry=False)
    assert report.good(steps, judged, dry=True)
    assert report.without(steps)[-1] == "the step `staged`"


@pytest.mark.parametrize("lacks", [[], ["NIXL", "cupy"]])
def test_the_last_line_names_what_was_left_out(lacks, monkeypatch, tmp_path, capsys):
    from gpu_check import __main__ as command

    monkeypatch.setattr(run, "start", lambda *_: Outcome(absent=lacks))
    monkeypatch.setattr(wheel, "check_machine", lambda: None)
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path), "--only", "machine"])
    assert command.main() == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("good after ")
    assert (", without NIXL, cupy: " in last) == bool(lacks)
    assert json.loads((tmp_path / "gpu-check.json").read_text())["without"] == lacks


def test_what_is_judged_is_the_kernel_that_a_transfer_takes():
    seconds = {"kernel": 4.0, "bulk": 1.0, "loop": 40.0, "torch": 8.0}
    assert speed.taken_way({}, 16384) == "kernel", "no transfer takes the bulk engine until the route says so"
    assert [speed.taken_way({"bulk_from_bytes": 8192}, size) for size in (4096, 8192)] == ["kernel", "bulk"]
    found = speed.ratios(seconds, 2.0, "kernel")
    assert (found["fraction"], found["times_loop"], found["times_torch"]) == (0.5, 10.0, 2.0)
    assert (found["fraction_bulk"], found["times_batch"], found["taken"]) == (2.0, None, "kernel")
    found = speed.ratios(seconds, 2.0, "bulk")
    assert (found["fraction"], found["times_loop"], found["times_torch"]) == (2.0, 40.0, 8.0)


def test_the_table_has_the_figures_of_nixl_beside_ours():
    steps = steps_with(0.9, 0.7, 25.0, 1.1)
    assert report.table_rows(steps)[0]["nixl_gb_s"] == 3.25
    shown = report.tables(steps).splitlines()
    assert shown[0] == "paged copies on the GPU"
    assert shown[2].split()[0] == "4096"
    assert {"3.2", "6.5", "2.0"} <= set(shown[2].split())
    assert "-" in shown[2].split(), "what was not measured is a dash"


def test_what_was_measured_otherwise_is_said_below_the_table():
    steps = steps_with(0.9, 0.7, 25.0, 1.1)
    steps["speed"]["facts"] = {"total_bytes": 512 << 20, "rounds": 8}
    shown = report.tables(steps)
    parts = "512 MiB, 8 rounds", "each byte is read and written twice", "64 MiB, one round, by the host's clock"
    for part in (*parts, "the loop is of `cuMemcpyAsync`, the driver's call below `cudaMemcpyAsync`"):
        assert part in shown, shown
    assert report.notes({}) == []


def read_png(path):
    """The size and the dots of a PNG of three bytes a dot, read by the format's rules."""
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, size = 8, b"", None
    while at < len(content):
        length = struct.unpack(">I", content[at : at + 4])[0]
        kind, body = content[at + 4 : at + 8], content[at + 8 : at + 8 + length]
        assert struct.unpack(">I", content[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + body)
        if kind == b"IHDR":
            size = struct.unpack(">II", body[:8])
            assert body[8:] == bytes([8, 2, 0, 0, 0])
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    dots = zlib.decompress(data)
    stride = 1 + 3 * size[0]
    assert len(dots) == stride * size[1]
    return size, [dots[row * stride + 1 : (row + 1) * stride] for row in range(size[1])]


def test_a_picture_by_the_standard_library(tmp_path):
    canvas = png.Canvas(10, 4)
    canvas.dot(2, 1, (255, 0, 0))
    canvas.dot(50, 50, (255, 0, 0))
    canvas.line((0, 3), (9, 3), (0, 0, 255))
    canvas.save(tmp_path / "dots.png")
    size, rows = read_png(tmp_path / "dots.png")
    assert size == (10, 4)
    assert rows[1][6:9] == b"\xff\0\0"
    assert rows[3] == b"\0\0\xff" * 10
    assert rows[0] == b"\xff" * 30


@pytest.mark.parametrize("without", [True, False])
def test_the_picture_shows_every_line_that_was_measured(without, monkeypatch, tmp_path):
    if without:
        monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    rows = report.table_rows(steps_with(0.9, 0.7, 25.0, 1.1))
    drawn_by = picture.draw(rows, "pdkv gpu-check: a GPU", tmp_path / "table.png")
    assert drawn_by == ("the standard library" if without else "matplotlib")
    if without:
        _, lines = read_png(tmp_path / "table.png")
        dots = b"".join(lines)
        for key, _, colour in picture.LINES:
            assert (bytes(colour) in dots) == any(row.get(key) for row in rows), key
    assert picture.draw([], "nothing", tmp_path / "empty.png") == drawn_by


def carry(folder, name, content=""):
    """Puts a wheel there that has one file."""
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr(f"{name.split('-')[0]}/__init__.py", content)


HERE = f"cp{sys.version_info.major}{sys.version_info.minor}"
MACHINE = platform.machine()


def test_what_is_not_installed_is_unpacked_from_the_wheel_that_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    carry(tmp_path, f"pdkv-1-cp311-abi3-manylinux_2_34_{MACHINE}.whl")
    for tags in (f"cp39-cp39-manylinux_2_28_{MACHINE}", f"{HERE}-{HERE}-manylinux_2_28_other", f"{HERE}-{HERE}-win32"):
        carry(tmp_path, f"numpy-2-{tags}.whl", "raise ImportError")
    with pytest.raises(FileNotFoundError, match=r"numpy is not installed.*make wheel GPU_PYTHON_VERSION=3"):
        wheel.folders(tmp_path)
    carry(tmp_path, f"numpy-1-{HERE}-{HERE}-manylinux_2_27_{MACHINE}.manylinux_2_28_{MACHINE}.whl", "fits = True")
    found = wheel.folders(tmp_path)
    assert [path.name for folder in found for path in folder.iterdir()] == ["pdkv", "numpy"]
    assert (found[1] / "numpy/__init__.py").read_text() == "fits = True"


def test_of_several_wheels_the_newest_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(wheel, "NEEDED", ("nobody_has_this",))
    for number in (2, 1):
        name = f"nobody_has_this-{number}-py3-none-any.whl"
        carry(tmp_path, name, str(number))
        os.utime(tmp_path / name, (1000 * number, 1000 * number))
    (found,) = wheel.folders(tmp_path)
    assert (found / "nobody_has_this/__init__.py").read_text() == "2"


def test_installed_packages_come_before_wheels(tmp_path):
    import pdkv

    assert list(Path(pdkv.__file__).parent.glob("_core*.so"))
    (tmp_path / "pdkv-1-cp311-abi3-any.whl").write_text("never read")
    assert wheel.folders(tmp_path) == []


def test_a_checkout_in_which_nothing_was_built_is_not_pdkv(tmp_path, monkeypatch):
    (tmp_path / "pdkv").mkdir()
    (tmp_path / "pdkv/__init__.py").write_text("")
    spec = importlib.util.spec_from_file_location("pdkv", tmp_path / "pdkv/__init__.py")
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(FileNotFoundError, match="pdkv is not installed"):
        wheel.folders(tmp_path)


def test_what_is_missing_ends_a_run_before_it_begins(monkeypatch, tmp_path, capsys):
    from gpu_check import __main__ as command

    monkeypatch.setattr(wheel, "NEEDED", ("nobody_has_this",))
    monkeypatch.setattr(run, "start", lambda *_: pytest.fail("a step was started"))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path), "--wheels", str(tmp_path)])
    assert command.main() == 2
    assert "nobody_has_this is not installed" in capsys.readouterr().err


def test_a_machine_without_torch_or_a_driver_is_told_so(monkeypatch):
    here = importlib.util.find_spec
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match=r"has no torch.*GPU_PYTHON=.*DRY=1"):
        wheel.check_machine()
    monkeypatch.setattr(wheel.importlib.util, "find_spec", lambda name: here("numpy"))
    monkeypatch.setenv("PDKV_CUDA_LIBRARY", "/nowhere/libcuda.so.1")
    with pytest.raises(FileNotFoundError, match=r"no CUDA driver \(/nowhere.*DRY=1"):
        wheel.check_machine()


def test_a_step_that_nobody_knows_is_refused(monkeypatch, capsys):
    from gpu_check import __main__ as command

    monkeypatch.setattr(run, "start", lambda *_: pytest.fail("a step was started"))
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--dry", "--only", "kernels,nosuch"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert "no step is called `nosuch`; there are machine, kernels" in capsys.readouterr().err


def test_what_is_carried_beside_pdkv_is_one_release_for_the_python_there():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (pinned,) = project["dependency-groups"]["gpu-machine"]
    assert re.fullmatch(r"numpy==[0-9.]+", pinned)
    makefile = (ROOT / "Makefile").read_text()
    recipe = makefile.split("\nwheel:")[1].split("\n\n")[0]
    for part in (
        "gpu-machine",
        "pip download",
        "--only-binary",
        "--python-version $(GPU_PYTHON_VERSION)",
        "--dest dist",
    ):
        assert part in recipe, part
    assert "GPU_PYTHON_VERSION ?= 3.12\n" in makefile
