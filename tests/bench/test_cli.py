import argparse
import csv
import io
import json
import sys

import pytest

from bench.fake import World
from pdkv.bench import cli, producer, run
from pdkv.bench.pipe import exchange, peers
from pdkv.bench.side import Toolkit
from pdkv.errors import ConfigError


def parse(*arguments):
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers(required=True))
    return parser.parse_args(["bench", *arguments])


def cases(*arguments):
    return list(cli.axes(parse(*arguments)).cases())


@pytest.fixture
def world(monkeypatch):
    """Commands run with the stand-in engine, the producer in a thread."""
    world = World()
    monkeypatch.setattr(Toolkit, "real", classmethod(lambda cls: world.kit))
    monkeypatch.setattr(producer, "spawned", lambda timeout_s: producer.threaded(world.kit, timeout_s))
    for module in (exchange, peers):
        monkeypatch.setattr(module, "has_torch", lambda: False)
    return world


SMALL = ["--model", "tiny", "--isl", "64", "--iters", "2", "--transport", "shm", "--memory", "private"]


def test_the_default_fits_a_small_machine():
    (case,) = cases()
    assert (case.geometry.name, case.op, case.transport) == ("llama-3.1-8b", "pull", "auto")
    assert 3 * case.pool_bytes < 2 << 30
    assert case.total_bytes == 256 << 20


def test_lists_become_axes():
    assert len(cases("--model", "tiny,qwen3-32b", "--op", "pull,push", "--transport", "shm,cma,tcp")) == 12
    assert [c.blocks for c in cases("--isl", "1,16,17", "--model", "tiny")] == [1, 1, 2]


def test_how_ucx_is_used_is_part_of_the_case():
    (case,) = cases("--transport", "ucx", "--ucx-tls", "posix,cma", "--ucx-one-sided", "any", "--ucx-window", "16")
    assert case.where == "private"
    assert (case.ucx.settings, case.ucx.one_sided, case.ucx.window) == ({"TLS": "posix,cma"}, "any", 16)
    assert cases()[0].ucx.settings == {}


def test_raw_blocks():
    found = cases("--block-bytes", "4KiB,1MiB", "--total", "64MiB")
    assert [(case.page_bytes, case.pages) for case in found] == [(4096, 16384), (1 << 20, 64)]
    assert cases("--block-bytes", "1MiB")[0].total_bytes == 512 << 20


def test_custom_models():
    (case,) = cases("--model", "custom", "--layers", "2", "--kv-heads", "1", "--head-dim", "4", "--dtype", "float32")
    assert case.page_bytes == 16 * 2 * 4 * 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "gpt-2"], "gpt-2"),
        (["--model", "custom", "--layers", "1"], "--kv-heads"),
        (["--layers", "4"], "--model custom"),
        (["--total", "1MiB"], "--block-bytes"),
        (["--block-bytes", "4KiB", "--layers", "1"], "--layers"),
        (["--transport", "rdma"], "rdma"),
        (["--op", "steal"], "steal"),
        (["--layout", "LHBNC"], "LHBNC"),
        (["--fragmentation", "some"], "some"),
        (["--slots-factor", "0.1"], "slots_factor"),
        (["--slots-factor", "nan"], "slots_factor"),
        (["--ucx-one-sided", "always"], "always"),
        (["--ucx-window", "100000"], "100000"),
    ],
)
def test_contradictions_are_refused_by_name(arguments, named):
    with pytest.raises(ConfigError) as caught:
        cases(*arguments)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "arguments", [["--isl", "0"], ["--block-bytes", "4QB"], ["--iters", "x"], ["--mode", "fast"], ["--seed", "-1"]]
)
def test_argparse_shows_bad_values(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(*arguments)
    assert caught.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--role", "producer"], "--listen"),
        (["--role", "consumer"], "--connect"),
        (["--listen", "127.0.0.1:0"], "--role producer"),
        (["--connect", "127.0.0.1:1"], "--role consumer"),
        (["--plot", "x.bmp"], "x.bmp"),
        (["--output", "no/such/folder/x.json"], "no existing folder"),
        (["--mode", "latency", "--plot", "x.png"], "--plot"),
        (["--compare", "gloo"], "gloo"),
        (["--mode", "pipe", "--compare", "ucxx"], "ucxx"),
        (["--mode", "pipe", "--plot", "x.png"], "--plot"),
        (["--mode", "lookup", "--compare", "gloo"], "--compare"),
        (["--mode", "lookup", "--op", "push", "--model", "tiny", "--entries", "4"], "--op"),
        (["--mode", "lookup", "--entries", "1"], "entries"),
        (["--mode", "pipe", "--transport", "inproc"], "inproc"),
        (["--mode", "pipe", "--shape", "1,1,1,1,1,1,1,1,1"], "extents"),
        (["--mode", "latency", "--compare", "ucxx"], "--compare"),
        (["--mode", "latency", "--transport", "inproc"], "two processes"),
    ],
)
def test_what_cannot_run_ends_with_2_and_says_why(arguments, named, capsys, world):
    assert cli.run(parse(*arguments)) == 2
    assert named in capsys.readouterr().err


def test_a_right_run_ends_with_0(world, capsys):
    assert cli.run(parse(*SMALL)) == 0
    told = capsys.readouterr()
    assert "none wrong" in told.out
    assert "limit scattered copy" in told.out
    assert told.err == ""


def test_one_wrong_byte_ends_with_1(world, capsys):
    world.fault, world.transfer = "flip", 2
    assert cli.run(parse(*SMALL)) == 1
    told = capsys.readouterr()
    assert "1 WRONG BYTES" in told.out
    assert "wrong: pull" in told.err


def test_a_failed_transfer_ends_with_2(world, capsys):
    world.fault, world.transfer = "fail", 1
    assert cli.run(parse(*SMALL)) == 2
    assert "made to fail" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["json", "csv", "text"])
def test_reports_go_to_files(world, form, tmp_path, capsys):
    path = tmp_path / "report"
    assert cli.run(parse(*SMALL, "--format", form, "--output", str(path))) == 0
    assert capsys.readouterr().out == ""
    text = path.read_text()
    if form == "json":
        assert [row["kind"] for row in json.loads(text)["rows"]] == ["pdkv", "limit"]
    else:
        assert "tiny" in text


@pytest.mark.parametrize("form", ["text", "json", "csv"])
def test_a_pipe_is_measured_and_shown(world, form, capsys):
    arguments = ["--shape", "5,40000", "--small", "30", "--iters", "2", "--transport", "shm,tcp", "--format", form]
    assert cli.run(parse("--mode", "pipe", *arguments)) == 0
    told = capsys.readouterr().out
    if form == "text":
        for word in ("2 x [5, 40000] uint16", "30 x [1024] uint8", "limit scattered copy", "nothing wrong"):
            assert word in told
        assert "not measured: torch is not installed" in told
        return
    found = json.loads(told)["rows"] if form == "json" else list(csv.DictReader(io.StringIO(told)))
    names = [row["name"] for row in found]
    others = ["gloo send/recv", "pickle over TCPStore"]
    assert names == ["pipe", "scattered copy", *others, "pipe", "sendmsg + readv", others[0], "pipe", *others]


def test_a_wrong_byte_of_a_pipe_ends_with_1(world, capsys):
    world.fault, world.transfer = "flip", 3
    assert cli.run(parse("--mode", "pipe", "--shape", "5,40000", "--small", "0", "--iters", "1")) == 1
    assert "1 WRONG" in capsys.readouterr().out


def test_lookups_are_measured_and_shown(world, capsys):
    arguments = ["--entries", "8", "--tokens", "8", "--format", "json", *SMALL]
    assert cli.run(parse("--mode", "lookup", *arguments)) == 0
    found = json.loads(capsys.readouterr().out)["rows"]
    names = [row["name"] for row in found]
    assert names[:3] == ["drop_select, here", "index alone, here", "drop_select, two processes"]
    assert names[12:] == ["drop_select_into", "pull", "scattered copy"]
    assert {row["wrong"] for row in found} == {0}


def test_inproc_needs_no_process(world, monkeypatch, capsys):
    world.path = "inproc"
    monkeypatch.setattr(producer, "spawned", lambda timeout_s: pytest.fail("a process was started"))
    assert cli.run(parse("--model", "tiny", "--isl", "64", "--iters", "1", "--transport", "inproc")) == 0


def test_plots_are_written(world, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "rates.svg"
    assert cli.run(parse(*SMALL, "--plot", str(path))) == 0
    assert path.stat().st_size > 1000


def test_no_limit_leaves_the_row_out(world, capsys):
    assert cli.run(parse(*SMALL, "--no-limit")) == 0
    assert "limit scattered" not in capsys.readouterr().out


def test_cases_that_share_a_producer_are_grouped():
    groups = list(run._by_place(cases("--model", "tiny", "--transport", "shm,inproc,tcp", "--op", "pull,push")))
    assert [[case.transport for case in group] for group in groups] == [["shm"] * 2, ["inproc"] * 2, ["tcp"] * 2]


def test_help_names_every_preset(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    shown = capsys.readouterr().out
    for word in ("llama-3.3-70b", "deepseek-v3", "--suite", "exit code"):
        assert word in shown


def test_the_parser_imports_nothing_heavy():
    import subprocess

    code = "import sys, pdkv.bench.cli; sys.exit(bool({'numpy', 'rich', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == 0
