"""Where a consumer may connect, whatever requests and directories say."""

from __future__ import annotations

import pytest

from pdkv.connectors.core.places import Places
from pdkv.errors import PeerUnreachableError


def refuses(call, *args):
    with pytest.raises(PeerUnreachableError) as raised:
        call(*args)
    assert not raised.value.retryable
    return str(raised.value)


@pytest.mark.parametrize(
    ("told", "directory", "reached", "address"),
    [
        ("127.0.0.1:7000", "127.0.0.1", "127.0.0.1", "127.0.0.1:7000"),
        ("10.0.0.7:7000", "node-7", "10.0.0.7", "10.0.0.7:7000"),
        ("node-7:7000", "Node-7.", "10.0.0.7", "10.0.0.7:7000"),
        ("[::1]:7000", "::1", "::1", "[::1]:7000"),
        ("[0:0::1]:7000", "[::1]", "::1", "[::1]:7000"),
        ("0.0.0.0:7000", "node-7", "10.0.0.7", "10.0.0.7:7000"),
        ("[::]:7000", "node-7", "fe80::7", "[fe80::7]:7000"),
    ],
)
def test_an_engine_is_on_the_host_of_its_directory(told, directory, reached, address):
    assert Places(None).engine_address(told, directory, reached) == address


@pytest.mark.parametrize("told", ["127.0.0.1:22", "169.254.169.254:80", "10.0.0.8:7000", "[::1]:7000", "localhost:80"])
def test_a_directory_leads_nowhere_else(told):
    assert "is not the directory's, `node-7`" in refuses(Places(None).engine_address, told, "node-7", "10.0.0.7")


@pytest.mark.parametrize(
    "told",
    ["", ":", "host", "host:", ":7000", "host:0", "host:65536", "host:1e3", "host:-1", "host:7 ", "h:" + "9" * 5000],
)
def test_what_is_no_address_is_refused(told):
    assert "no `host:port`" in refuses(Places(None).engine_address, told, "host", "10.0.0.7")
    assert "no `host:port`" in refuses(Places(["host"]).engine_address, told, "host", "10.0.0.7")


def test_any_directory_may_be_asked_unless_it_is_said_which():
    Places(None).check_directory("anything")
    places = Places(["node-7", "10.0.0.0/8", "192.168.1.9", "[::1]"])
    for host in ("node-7", "NODE-7.", "10.255.0.1", "192.168.1.9", "::1", "[::1]"):
        places.check_directory(host)
    for host in ("node-8", "node-7.evil.example", "11.0.0.1", "192.168.1.8", "::2", "", "127.0.0.1", "0.0.0.0"):
        assert "allowed_hosts" in refuses(places.check_directory, host)


def test_what_is_allowed_holds_for_engines_too():
    places = Places(["10.0.0.0/8"])
    # Ranks may be on other hosts than their directory then.
    assert places.engine_address("10.0.0.8:7000", "10.0.0.7", "10.0.0.7") == "10.0.0.8:7000"
    refuses(places.engine_address, "11.0.0.8:7000", "10.0.0.7", "10.0.0.7")


def test_nothing_is_allowed_by_an_empty_list():
    refuses(Places([]).check_directory, "127.0.0.1")


def test_a_refusal_is_one_printable_line():
    text = refuses(Places(["a"]).check_directory, "x\n2026 ERROR" + "y" * 500)
    assert "\n2026" not in text
    assert len(text) < 300
