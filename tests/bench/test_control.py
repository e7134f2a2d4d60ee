import json
import socket
import subprocess
import sys
import threading

import pytest

from bench.fake import World
from bench.test_cases import CASE
from pdkv.bench import control, producer
from pdkv.bench.control import Channel
from pdkv.errors import ConfigError, PdkvError, PeerLostError, PeerUnreachableError, TransferError


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = control.connect(control.join_address(*listener.getsockname()), 60.0)
        other, _ = listener.accept()
    with other:
        yield channel, other
    channel.close()


@pytest.fixture
def served():
    """A producer that has not been greeted."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        channel = control.connect(control.join_address(*listener.getsockname()), 60.0)
        server = producer.Producer(
            World().kit, Channel(listener.accept()[0], 60.0), "secret", insecure=False, timeout_s=60.0
        )
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield channel
    channel.close()
    thread.join(60)
    assert not thread.is_alive()


def test_errors_cross_with_class_text_and_hint(pair):
    channel, other = pair
    other.sendall(json.dumps(control.failure(TransferError("no luck", hint="try again"))).encode() + b"\n")
    with pytest.raises(TransferError, match="no luck") as caught:
        channel.ask("move")
    assert caught.value.hint == "try again"


@pytest.mark.parametrize("name", ["Exception", "os", "PdkvError", "nothing", None])
def test_an_unknown_error_class_is_the_base(pair, name):
    channel, other = pair
    other.sendall(json.dumps({"error": "odd", "class": name}).encode() + b"\n")
    with pytest.raises(PdkvError, match="odd") as caught:
        channel.answer()
    assert type(caught.value) is PdkvError


@pytest.mark.parametrize("line", [b"\x80\x04.\n", b"[1]\n", b"7\n", b"{\n", b"{}"], ids=repr)
def test_garbage_is_a_lost_peer(pair, line):
    channel, other = pair
    other.sendall(line)
    other.shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLostError):
        channel.receive()


def test_the_end_of_the_other_side_is_seen(pair):
    channel, other = pair
    other.shutdown(socket.SHUT_WR)
    assert channel.receive() is None


def test_silence_ends(pair):
    with pytest.raises(PeerLostError, match="silent"):
        Channel(pair[1], 0.01).receive()


def test_only_the_right_token_is_served(served):
    for token in (None, "", "secre", "secret2"):
        with pytest.raises(ConfigError, match="token"):
            served.ask("hello", token=token)
    with pytest.raises(ConfigError, match="first bench request"):
        served.ask("open", case=CASE.to_json())
    assert served.ask("hello", token="secret")["versions"]


def test_the_producer_survives_bad_requests(served):
    served.ask("hello", token="secret")
    bad = [
        ("shutdown", {}),
        ("open", {}),
        ("open", {"case": "tiny"}),
        ("fill", {"stamp": 1}),
        ("open", {"case": {**CASE.to_json(), "blocks": 1 << 25}}),
    ]
    for do, arguments in bad:
        with pytest.raises(PdkvError):
            served.ask(do, **arguments)
    served.ask("open", case=CASE.to_json())
    for do, arguments in (
        ("fill", {"stamp": "1"}),
        ("fill", {}),
        ("fill", {"stamp": True}),
        ("move", {"wanted": "x"}),
        ("send", {}),
        ("streams", {"count": 10**6}),
    ):
        with pytest.raises(PdkvError):
            served.ask(do, **arguments)
    served.ask("fill", stamp=1)
    served.ask("close")


def test_addresses():
    assert control.split_address("[::1]:80") == ("::1", 80)
    assert control.join_address("::1", 80) == "[::1]:80"
    assert control.split_address(control.join_address("10.0.0.1", 7)) == ("10.0.0.1", 7)
    for bad in ("", "host", "host:", ":80", "host:port", "host:99999", "host:²"):
        with pytest.raises(ConfigError):
            control.split_address(bad)


def test_nobody_there_is_named():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = control.join_address(*listener.getsockname())
    with pytest.raises(PeerUnreachableError, match="no bench producer"):
        control.connect(address, 1.0)


def test_listening_beyond_loopback_needs_to_be_asked_for():
    with pytest.raises(ConfigError, match="not loopback") as caught:
        producer.serve(World().kit, "0.0.0.0:0", insecure=False, timeout_s=1.0)
    assert "--insecure" in caught.value.hint


def test_a_producer_that_cannot_start_is_an_error(monkeypatch):
    real = subprocess.Popen

    def broken(command, **options):
        return real([sys.executable, "-c", "raise SystemExit(4)"], **options)

    monkeypatch.setattr(subprocess, "Popen", broken)
    with pytest.raises(PeerLostError, match="ended at once"), producer.spawned(60.0):
        pass
