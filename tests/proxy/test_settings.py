"""Settings that make no sense are refused by name, and nothing listens beyond loopback unasked."""

from __future__ import annotations

import argparse
import builtins
import re
import socket
from pathlib import Path

import pytest

from pdkv.errors import ConfigError, UnsupportedError
from pdkv.proxy import cli
from pdkv.proxy.settings import Settings

P, D = "http://127.0.0.1:8100", "http://127.0.0.1:8200"


def settings(**told):
    return Settings(**({"prefill": (P,), "decode": (D,)} | told)).checked()


@pytest.mark.parametrize(
    ("told", "names"),
    [
        ({"prefill": ()}, "--prefill"),
        ({"decode": ()}, "--decode"),
        ({"prefill": (P, P + "/")}, "twice"),
        ({"decode": ("127.0.0.1:8200",)}, "127.0.0.1:8200"),
        ({"decode": ("ftp://h:1",)}, "ftp://h:1"),
        ({"decode": ("http://h:1/v1",)}, "http://h:1/v1"),
        ({"decode": ("http://u:p@h:1",)}, "http://HOST:PORT"),
        ({"decode": ("http://h:99999",)}, "99999"),
        ({"decode": ("http://[::1",)}, "no URL"),
        ({"port": 65536}, "65536"),
        ({"port": -1}, "-1"),
        ({"retries": -1}, "retries"),
        ({"skip_prefill_below_tokens": -1}, "skip_prefill_below_tokens"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"connect_timeout_s": 0.0}, "connect_timeout_s"),
        ({"connect_timeout_s": float("nan")}, "connect_timeout_s"),
        ({"idle_timeout_s": -1.0}, "idle_timeout_s"),
        ({"probe_interval_s": 0.0}, "probe_interval_s"),
        ({"drain_timeout_s": -1.0}, "drain_timeout_s"),
        ({"host": "no such host."}, "no such host."),
        ({"allowed_hosts": ("10.0.0.0/33",)}, "10.0.0.0/33"),
        ({"allowed_hosts": ("a", " ")}, "--allowed-hosts"),
    ],
)
def test_bad_settings_are_refused_by_name(told, names):
    with pytest.raises(ConfigError) as error:
        settings(**told)
    assert names in str(error.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1"])
def test_beyond_loopback_needs_the_word_insecure(host):
    with pytest.raises(ConfigError, match="--insecure"):
        settings(host=host)
    assert settings(host=host, insecure=True).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_nothing(host):
    assert settings(host=host).host == host


@pytest.mark.parametrize(
    ("text", "plain"), [("http://h:1/", "http://h:1"), ("HTTP://[::1]:1", "http://[::1]:1"), ("https://h", "https://h")]
)
def test_urls_are_made_plain(text, plain):
    assert settings(decode=(text,)).decode == (plain,)


@pytest.mark.parametrize(
    ("told", "places"),
    [
        ({}, ("127.0.0.1", "127.0.0.0/8", "::1", "localhost")),
        ({"prefill": ("http://192.0.2.7:8100", "http://192.0.2.8:8100")}, ("192.0.2.7", "192.0.2.8")),
        ({"prefill": ("http://[2001:db8::7]:8100",)}, ("2001:db8::7",)),
        ({"allowed_hosts": ("node-7", "10.0.0.0/8")}, ("node-7", "10.0.0.0/8")),
        ({"allowed_hosts": ()}, ()),
        ({"allowed_hosts": ("node-7", "*")}, None),
    ],
)
def test_where_the_proxy_may_go(told, places):
    assert settings(**told).places() == places


def test_a_prefill_instance_is_known_by_its_name_and_by_its_addresses(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.7", 0))] * 2
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: found)
    assert settings(prefill=("http://node-7:8100",)).places() == ("node-7", "192.0.2.7")

    def fail(host, port):
        raise socket.gaierror("nobody knows")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert settings(prefill=("http://node-7:8100",)).places() == ("node-7",)


def parse(*words):
    parser = argparse.ArgumentParser()
    cli.add_parser(parser.add_subparsers())
    return parser.parse_args(["proxy", "--prefill", P, "--decode", D, *words])


def test_options_become_settings():
    assert cli.settings(parse()) == settings()
    said = "--port 1 --skip-prefill-below 2 --retries 3 --connect-timeout 4 --idle-timeout 0 --probe-interval 6"
    more = "--drain-timeout 7 --max-body 8 --host 0.0.0.0 --insecure --fallback-to-decode --prefill http://h:9"
    more += " --allowed-hosts 10.0.0.0/8 --allowed-hosts node-7"
    assert cli.settings(parse(*said.split(), *more.split())) == settings(
        prefill=(P, "http://h:9"),
        allowed_hosts=("10.0.0.0/8", "node-7"),
        port=1,
        skip_prefill_below_tokens=2,
        retries=3,
        connect_timeout_s=4.0,
        idle_timeout_s=None,
        probe_interval_s=6.0,
        drain_timeout_s=7.0,
        max_body_bytes=8,
        host="0.0.0.0",
        insecure=True,
        fallback_to_decode=True,
    )


def test_the_guide_names_options_that_exist():
    parser = argparse.ArgumentParser()
    text = cli.add_parser(parser.add_subparsers()).format_help()
    guide = (Path(__file__).parents[2] / "docs/guides/proxy.md").read_text().partition("## Beyond one machine")[0]
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", guide)) - {"--help", "--api-key"}  # the second is vLLM's
    assert len(named) > 8
    assert {option for option in named if not re.search(rf"^  {option}\b", text, re.MULTILINE)} == set()


@pytest.mark.parametrize("absent", ["aiohttp", "prometheus_client"])
def test_without_the_extra_the_hint_says_what_to_install(absent, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name == "pdkv.proxy" and "serve" in (rest[2] or ()):
            raise ModuleNotFoundError(f"No module named '{absent}'", name=absent)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(UnsupportedError, match=absent) as error:
        cli.run(parse())
    assert error.value.hint == "pip install 'pdkv[proxy]'"
