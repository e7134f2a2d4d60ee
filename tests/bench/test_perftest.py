"""`ucx_perftest` as a row: what it is asked, what is read from its output, and what is said when it can't be had."""

import os
import stat
import sys
from pathlib import Path

import pytest

from pdkv.bench import perftest
from pdkv.bench.rivals import perftest_name
from pdkv.errors import PdkvError, UnsupportedError

# As versions 1.13.1 and 1.22.0 wrote it, both with `-f -v`.
PUT = """\
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
24414,0.067,9.933,9.933,6291.85,6291.85,100670,100670
"""
GET_WITH_WARNINGS = """\
[1796005431.894493] [vm:15227:0]          parser.c:2355 UCX  WARN  unused environment variable: UCX_X
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
 1525,68.127,886.011,886.011,1128.65,1128.65,1129,1129
"""
NO_TRANSPORT = """\
iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
[1796005431.894493] [vm:15227:0]     ucp_context.c:1492 UCX  WARN  transport 'nonsense' is not available
[1796005431.894502] [vm:15227:0]     ucp_context.c:1754 UCX  ERROR no usable transports/devices (asked nonsense)
[1796005431.894509] [vm:15227:0]    perftest_run.c:363  UCX  ERROR Failed to run test: No such device
"""


def test_the_rate_is_that_of_all_messages_in_bytes():
    assert perftest.parse(PUT) == perftest.Result(24414, 6291.85 * 2**20)
    # The two numbers that the program prints of the same run agree.
    assert perftest.parse(PUT).bytes_per_s == pytest.approx(100670 * 65536, rel=1e-3)


def test_warnings_before_and_blanks_in_the_numbers_are_read_over():
    assert perftest.parse(GET_WITH_WARNINGS).messages == 1525


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (NO_TRANSPORT, "no usable transports/devices"),
        ("", "it wrote nothing"),
        ("ucx_perftest: invalid option -- 'X'\n", "invalid option"),
        (PUT.replace("6291.85", "n/a"), "no result"),
        (PUT.rpartition(",")[0], "no result"),
    ],
)
def test_an_output_without_a_result_is_quoted(text, said):
    with pytest.raises(PdkvError, match=said):
        perftest.parse(text)


def test_the_lane_decides_what_is_compared():
    assert perftest_name("pull", "put/get over cma, UCX 1.22.0") == "ucp_get"
    assert perftest_name("write", "put/get over tcp/lo, UCX 1.13.1") == "ucp_put_bw"
    assert perftest_name("push", "active messages over tcp/lo, UCX 1.13.1") == "ucp_am_bw"


def test_memory_is_what_a_cache_is_unless_told():
    plain = perftest.settings({"TLS": "posix,cma"})
    # Of the heap, which the C library fills: pages that nobody wrote to would all be the one of zeros.
    assert (plain["UCX_ALLOC_PRIO"], int(plain["MALLOC_PERTURB_"]) > 0) == ("heap", True)
    assert perftest.settings({"ALLOC_PRIO": "thp"})["UCX_ALLOC_PRIO"] == "thp"
    assert perftest.settings({"TLS": "posix,cma"})["UCX_TLS"] == "posix,cma"


def test_transports_are_those_that_pdkv_would_take(monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert perftest.settings({})["UCX_TLS"] == "^tcp"
    monkeypatch.setenv("UCX_TLS", "rc")
    assert "UCX_TLS" not in perftest.settings({})


def test_without_the_program_the_reason_is_typed(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(perftest.wheels, "folders", list)
    with pytest.raises(UnsupportedError, match="ucx_perftest") as caught:
        perftest.find("1.22.0")
    assert "ucx-utils" in str(caught.value)


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel's folders, with programs that are scripts; gives the library and writes what the program is."""
    root = tmp_path / "site-packages" / "libucx"
    (root / "bin").mkdir(parents=True)
    (root / "lib").mkdir()

    def program(name, text):
        path = root / "bin" / name
        path.write_text(f"#!{sys.executable}\n{text}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    monkeypatch.setattr(perftest.wheels, "folders", list)
    program("ucx_info", "print('# Library version: 1.22.0\\n# Library path: x')")
    return root / "lib" / "libucp.so.0", program


def test_the_program_of_a_wheel_runs_with_its_own_libraries(wheel):
    library, program = wheel
    program("ucx_perftest", "")
    tool = perftest.find("1.22.0", library)
    assert tool.path.parent.parent == library.parent.parent
    assert (tool.version, tool.environment) == ("1.22.0", {"LD_LIBRARY_PATH": str(library.parent)})


def test_the_program_is_of_pdkv_s_version_or_else_the_newest(wheel, tmp_path, monkeypatch):
    library, program = wheel
    program("ucx_perftest", "")
    monkeypatch.setattr(perftest.wheels, "folders", lambda: [("libucx wheel", str(library.parent))])
    system = tmp_path / "system"
    system.mkdir()
    for name, text in (("ucx_perftest", ""), ("ucx_info", "print('# Version 1.13.1')")):
        (system / name).write_text(f"#!{sys.executable}\n{text}")
        (system / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(system))
    assert perftest.find("1.13.1").path == system / "ucx_perftest"
    for version in ("1.22.0", "1.23.0", ""):
        assert perftest.find(version).version == "1.22.0"


TWO_SIDED = """
import os, socket, sys
port = int(sys.argv[sys.argv.index("-p") + 1])
if sys.argv[1] == "-p":
    with socket.create_server(("127.0.0.1", port)) as server:
        server.accept()[0].close()
else:
    socket.create_connection((sys.argv[1], port)).close()
    assert os.environ["UCX_TLS"] == "tcp" and "libucx" in os.environ["LD_LIBRARY_PATH"], os.environ
    sizes = dict(zip(sys.argv[4::2], sys.argv[5::2]))
    assert (sizes["-t"], sizes["-s"], sizes["-O"]) == ("ucp_get", "65536", "16"), sys.argv
    print("iterations,avg_bw,overall_bw,overall_mr")
    print(f"{sizes['-n']},1,2.0,3")
"""


def test_two_processes_run_and_end(wheel, no_child_left):
    library, program = wheel
    program("ucx_perftest", TWO_SIDED)
    result = perftest.run(perftest.find("1.22.0", library), "ucp_get", 65536, 100, 16, {"TLS": "tcp"}, timeout_s=60)
    assert result == perftest.Result(100, 2.0 * 2**20)


def test_a_server_that_does_not_start_is_an_error_and_leaves_nothing(wheel, no_child_left):
    library, program = wheel
    program("ucx_perftest", "raise SystemExit(1)")
    with pytest.raises(PdkvError, match="does not listen"):
        perftest.run(perftest.find("1.22.0", library), "ucp_get", 65536, 100, 16, {}, timeout_s=60)


def test_a_client_that_hangs_is_ended_at_its_deadline(wheel, no_child_left):
    library, program = wheel
    program("ucx_perftest", TWO_SIDED.replace('print("iterations', 'import time; time.sleep(60); print("iterations'))
    with pytest.raises(PdkvError, match="did not end within"):
        perftest.run(perftest.find("1.22.0", library), "ucp_get", 65536, 100, 16, {"TLS": "tcp"}, timeout_s=1)


@pytest.fixture
def no_child_left():
    before = children()
    yield
    assert children() - before == set()


def children():
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii").split())
