"""The directory under honest and other guests, and what a consumer makes of directories that are none."""

from __future__ import annotations

import json
import resource
import selectors
import socket
import struct
import threading
import time
from contextlib import contextmanager, suppress

import pytest

from connectors.sides import until
from pdkv.connectors.core import directory
from pdkv.connectors.core.directory import Directory
from pdkv.connectors.core.inquiry import fetch
from pdkv.connectors.core.work import RankInfo
from pdkv.errors import ConfigError, HandshakeError, PeerUnreachableError

GROUP = {"fingerprint": "f" * 64, "block_tokens": 16, "layers": 2, "layout": "as it lies"}
RANKS = [
    RankInfo(
        tp_rank=0, pp_rank=0, address="127.0.0.1:7000", incarnation="a" * 32, issuers=(b"SECRET",), groups=(GROUP,)
    ),
    RankInfo(
        tp_rank=1, pp_rank=0, address="127.0.0.1:7001", incarnation="b" * 32, issuers=(b"SECRET",), groups=(GROUP,)
    ),
]
ASK = {"version": 1, "ask": "ranks"}


def framed(message):
    text = message if isinstance(message, bytes) else json.dumps(message).encode()
    return struct.pack(">I", len(text)) + text


@pytest.fixture
def served():
    served = Directory("engine-p", RANKS)
    yield served
    served.close()


def dial(served):
    return socket.create_connection((served.host, served.port), timeout=30)


def said(connection):
    """All that the directory says until it hangs up."""
    parts = []
    with suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def test_the_ranks_are_told(served):
    told = fetch("127.0.0.1", served.port, 30)
    assert told.engine_id == "engine-p"
    assert told.host == "127.0.0.1"
    assert [(rank.tp_rank, rank.address, rank.incarnation) for rank in told.ranks] == [
        (0, "127.0.0.1:7000", "a" * 32),
        (1, "127.0.0.1:7001", "b" * 32),
    ]
    assert told.ranks[0].groups == (GROUP,)


def test_the_secrets_are_not(served):
    with dial(served) as connection:
        connection.sendall(framed(ASK))
        answer = said(connection)
    assert b"engine-p" in answer
    assert b"SECRET" not in answer
    assert b"issuer" not in answer


def test_a_question_may_come_in_pieces(served):
    with dial(served) as connection:
        for byte in framed(ASK):
            connection.sendall(bytes([byte]))
        assert b"engine-p" in said(connection)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        struct.pack(">I", 4097),
        struct.pack(">I", 0),
        framed(b"{"),
        framed(b"[" * 4000),
        framed([]),
        framed({"version": 1}),
        framed(ASK) + b"x",
        b"",
    ],
    ids=lambda sent: repr(sent[:12]),
)
def test_who_asks_nonsense_is_hung_up_on(served, monkeypatch, sent):
    monkeypatch.setattr(directory, "_MANNERS_S", 1000.0)  # at once, not when its time is over
    with dial(served) as connection:
        connection.sendall(sent)
        if not sent:
            connection.shutdown(socket.SHUT_WR)
        assert said(connection) == b""
    assert fetch("127.0.0.1", served.port, 30).engine_id == "engine-p"


@pytest.mark.parametrize("asked", [{**ASK, "version": 2}, {**ASK, "version": True}, {**ASK, "ask": "blocks"}])
def test_who_speaks_another_version_hears_which_this_is(served, asked):
    with dial(served) as connection:
        connection.sendall(framed(asked))
        answer = said(connection)
    assert json.loads(answer[4:]) == {"version": 1, "error": "this version answers `ranks` only"}


def test_who_says_nothing_or_drips_is_dropped(served, monkeypatch):
    monkeypatch.setattr(directory, "_MANNERS_S", 0.3)
    with dial(served) as silent, dial(served) as slow:
        question = framed(ASK)
        for at in range(1000):
            try:
                slow.sendall(question[at % 4 : at % 4 + 1] if at < 4 else question[at : at + 1])
            except OSError:
                break
            if at > len(question) - 3:
                break
            time.sleep(0.02)
        assert said(silent) == b""


def test_who_does_not_read_is_dropped(monkeypatch):
    monkeypatch.setattr(directory, "_MANNERS_S", 0.3)
    hung_up, drop = threading.Event(), directory._drop
    monkeypatch.setattr(directory, "_drop", lambda *guest: (drop(*guest), hung_up.set()))
    big = RankInfo(0, 0, "127.0.0.1:1", "a" * 32, (), ({"layout": "x" * 900_000},))
    served = Directory("engine-p", [big])
    served._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    try:
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect((served.host, served.port))
            connection.sendall(framed(ASK))
            assert hung_up.wait(60)
            # What the kernel holds still comes, but not all.
            assert len(said(connection)) < 900_000
    finally:
        served.close()


def test_a_flood_of_idle_guests_keeps_nobody_out(served, monkeypatch):
    monkeypatch.setattr(directory, "_MANNERS_S", 1000.0)
    guests = [dial(served) for _ in range(200)]
    try:
        assert fetch("127.0.0.1", served.port, 30).engine_id == "engine-p"
        # The oldest went, and no more than 64 are left.
        assert said(guests[0]) == b""
    finally:
        for guest in guests:
            guest.close()


def test_a_bug_with_one_guest_keeps_nobody_out(served, monkeypatch, caplog):
    monkeypatch.setattr(directory, "_answer_to", lambda *args: 1 / 0)
    with dial(served) as connection:
        connection.sendall(framed(ASK))
        until(lambda: "ZeroDivisionError" in caplog.text)
    monkeypatch.undo()
    assert fetch("127.0.0.1", served.port, 30).engine_id == "engine-p"


def test_many_ask_at_once(served):
    answers = []
    threads = [
        threading.Thread(target=lambda: answers.append(fetch("127.0.0.1", served.port, 60).engine_id))
        for _ in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == ["engine-p"] * 40


def test_it_costs_one_thread_which_ends():
    before = set(threading.enumerate())
    served = Directory("engine-p", RANKS)
    for _ in range(5):
        fetch("127.0.0.1", served.port, 30)
    [thread] = set(threading.enumerate()) - before
    served.close()
    served.close()
    assert not thread.is_alive()
    with pytest.raises(PeerUnreachableError):
        fetch("127.0.0.1", served.port, 30)


def test_a_restart_on_the_same_port_works():
    first = Directory("engine-p", RANKS)
    port = first.port
    fetch("127.0.0.1", port, 30)
    first.close()
    second = Directory("engine-q", RANKS, port=port)
    assert fetch("127.0.0.1", port, 30).engine_id == "engine-q"
    second.close()


def test_a_port_that_is_taken_is_said(served):
    with pytest.raises(ConfigError, match=f"`127.0.0.1:{served.port}`"):
        Directory("engine-q", RANKS, port=served.port)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_beyond_loopback_needs_the_word(host):
    with pytest.raises(ConfigError, match="insecure"):
        Directory("engine-p", RANKS, host)


def test_with_the_word_it_listens_beyond_loopback():
    served = Directory("engine-p", RANKS, "0.0.0.0", insecure=True)
    assert fetch("127.0.0.1", served.port, 30).engine_id == "engine-p"
    served.close()


@pytest.mark.parametrize("host", ["no such host", "256.1.1.1", "x" * 300])
def test_a_host_that_is_none_is_said(host):
    with pytest.raises(ConfigError):
        Directory("engine-p", RANKS, host)


def test_ipv6_works():
    try:
        served = Directory("engine-p", RANKS, "::1")
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    assert fetch("::1", served.port, 30).host == "::1"
    served.close()


@contextmanager
def impostor(answer, *, hang_up=True):
    """Something that listens, reads a little and says `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        over = threading.Event()

        def serve():
            with suppress(OSError):
                while True:
                    guest, _ = listening.accept()
                    with guest, suppress(OSError):
                        guest.recv(4096)
                        for part in answer if isinstance(answer, list) else [answer]:
                            guest.sendall(part)
                            if over.wait(0.05 if isinstance(answer, list) else 0):
                                return
                        if not hang_up:
                            over.wait(60)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            over.set()
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def honest(**changes):
    rank = {"tp_rank": 0, "pp_rank": 0, "address": "127.0.0.1:7000", "incarnation": "a", "groups": [GROUP]}
    return {"version": 1, "engine_id": "engine-p", "ranks": [{**rank, **changes}]}


def test_the_impostor_can_be_believable():
    with impostor(framed(honest())) as port:
        assert fetch("127.0.0.1", port, 30).ranks[0].groups == (GROUP,)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        struct.pack(">I", (1 << 20) + 1),
        framed(b"{"),
        framed(b"[" * 100_000),
        framed(b"\xff\xfe"),
        framed([]),
        framed("text"),
        framed({}),
        framed({"version": 1}),
        framed({"version": "1", "engine_id": "e", "ranks": []}),
        framed({"version": 1, "engine_id": 5, "ranks": []}),
        framed({"version": 1, "engine_id": "e" * 2000, "ranks": []}),
        framed({"version": 1, "engine_id": "e", "ranks": {}}),
        framed({"version": 1, "engine_id": "e", "ranks": [1]}),
        framed({"version": 1, "engine_id": "e", "ranks": [{}]}),
        framed({"version": 1, "engine_id": "e", "ranks": [{}] * 5000}),
        framed(honest(tp_rank=True)),
        framed(honest(tp_rank=-1)),
        framed(honest(tp_rank=1e300)),
        framed(json.dumps(honest()).replace('"tp_rank": 0', '"tp_rank": ' + "9" * 5000).encode()),
        framed(honest(address=7)),
        framed(honest(groups=[7])),
        framed(honest(groups=[{"a": []}])),
        framed(honest(groups=[{str(number): 1 for number in range(100)}])),
        framed(honest(groups=[GROUP] * 300)),
    ],
    ids=lambda answer: repr(answer[:60]),
)
def test_what_is_no_directory_is_said_to_be_none(answer):
    with impostor(answer) as port, pytest.raises(HandshakeError):
        fetch("127.0.0.1", port, 30)


def test_a_later_version_is_named():
    with impostor(framed({"version": 2})) as port, pytest.raises(HandshakeError, match="version `2`, this end `1`"):
        fetch("127.0.0.1", port, 30)


def test_a_stranger_can_not_forge_log_lines():
    with (
        impostor(framed({"version": "9\n2026 ERROR everything is lost" + "x" * 1000})) as port,
        pytest.raises(HandshakeError) as raised,
    ):
        fetch("127.0.0.1", port, 30)
    assert "\n2026" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    "answer",
    [b"", framed(honest())[:-1], [b"\0", b"\0", b"\1"] + [b"x"] * 2000],
    ids=["nothing", "not all", "a drip"],
)
def test_a_directory_that_never_answers_is_unreachable_in_time(answer):
    with impostor(answer, hang_up=False) as port:
        started = time.monotonic()
        with pytest.raises(PeerUnreachableError, match=f"127.0.0.1:{port}"):
            fetch("127.0.0.1", port, 0.3)
        assert time.monotonic() - started < 30


def test_one_that_hangs_up_is_unreachable():
    with impostor(framed(honest())[:-1]) as port, pytest.raises(PeerUnreachableError, match="hung up"):
        fetch("127.0.0.1", port, 30)


@pytest.mark.parametrize(
    ("host", "port"),
    [
        ("127.0.0.1", 1),
        ("no such host", 5),
        ("", 1),
        ("x" * 300, 5),
        ("127.0.0.1", 70_000),
        ("127.0.0.1", -1),
        ("a\0b", 1),
    ],
)
def test_nobody_there_is_unreachable(host, port):
    with pytest.raises(PeerUnreachableError):
        fetch(host, port, 30)


def test_a_start_without_descriptors_is_said(monkeypatch):
    def none_left():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(selectors, "DefaultSelector", none_left)
    with pytest.raises(ConfigError, match="Too many open files"):
        Directory("engine-p", RANKS)


def test_no_descriptor_left_is_survived(served, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    directory._log.warning("logging imports things when it is first used, for which it opens files")
    with socket.socket() as connection:
        with socket.socket() as lowest:
            free = lowest.fileno()
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            connection.connect((served.host, served.port))
            connection.sendall(framed(ASK))
            until(lambda: "can't accept" in caplog.text)
            time.sleep(0.5)
            # It waits a while after each failure.
            assert caplog.text.count("can't accept") < 10
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert b"engine-p" in said(connection)
