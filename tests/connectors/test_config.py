"""Settings as users write them: what is taken, what is refused and how it is called."""

from __future__ import annotations

import pytest

import pdkv
from pdkv.connectors.core.config import Settings
from pdkv.errors import ConfigError


def test_what_is_not_pdkvs_is_left_alone():
    settings = Settings.of({"backends": ["UCX"], "num_threads": 4, "kv_lease_duration": 12})
    assert settings == Settings(kv_lease_duration=12)


def test_what_the_user_wrote_wins_over_the_connectors_own_defaults():
    assert Settings.of({"port": 7}, port=5, host="127.0.0.2") == Settings(port=7, host="127.0.0.2")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("port", "5600"),
        ("port", True),
        ("engine_port", 1.5),
        ("host", ""),
        ("host", "0.0.0.0"),
        ("host", "::"),
        ("host", "192.0.2.1"),
        ("host", "127.evil.example"),
        ("host", "localhost.evil.example"),
        ("secret_file", ""),
        ("host", None),
        ("insecure", "yes"),
        ("allowed_hosts", "a"),
        ("allowed_hosts", [1]),
        ("allowed_hosts", 3),
        ("transports", "tcp"),
        ("transports", []),
        ("transports", ["tcp", "tpc"]),
        ("require", ""),
        ("require", "rdms"),
        ("require", 3),
        ("threads", "2"),
        ("threads", 0),
        ("staging_bytes", -1),
        ("staging_bytes", "64 MiB"),
        ("staging_bytes", 1e6),
        ("staging_bytes", True),
        ("staging_bytes", 1 << 63),
        ("staging_patience", 0),
        ("staging_patience", "30"),
        ("staging_patience", True),
        ("staging_patience", float("inf")),
        ("kv_lease_duration", 0),
        ("kv_lease_duration", "30"),
        ("kv_lease_duration", 3601),
        ("transfer_timeout", -1),
        ("transfer_timeout", float("inf")),
        ("connect_timeout", float("nan")),
        ("connect_timeout", True),
        ("model_id", ""),
        ("adopt", 1),
        ("verify_copies", "yes"),
        ("ucx", "rc"),
        ("ucx", {"tls": "rc"}),
        ("ucx", {"one_sided": "always"}),
    ],
)
def test_a_bad_value_is_named(key, value):
    with pytest.raises(ConfigError) as refused:
        Settings.of({key: value})
    assert refused.value.hint
    if key != "ucx" or value == "rc":
        assert f"`{key}` is " in refused.value.message
        assert f"`{value}`" in refused.value.message


@pytest.mark.parametrize("key", ["alowed_hosts", "transfer_timeout_s", "transport", "secretfile", "secret", "timeout"])
def test_what_looks_like_a_misspelt_key_is_refused(key):
    with pytest.raises(ConfigError, match=f"`{key}`") as refused:
        Settings.of({key: 1})
    assert "meant" in refused.value.hint


@pytest.mark.parametrize("key", ["transports", "require"])
def test_an_unknown_transport_is_answered_with_those_there_are(key):
    with pytest.raises(ConfigError) as refused:
        Settings.of({key: ["tpc"] if key == "transports" else "tpc"})
    assert all(f"`{name}`" in refused.value.hint for name in ("inproc", "shm", "cma", "tcp", "ucx"))


def test_what_is_required_must_be_among_what_may_be_used():
    with pytest.raises(ConfigError, match="`require` is `shm`") as refused:
        Settings.of({"transports": ["cma", "tcp"], "require": "shm"})
    assert "`cma`, `tcp`, `rdma`" in refused.value.hint
    assert Settings.of({"transports": ["ucx"], "require": "rdma"}).require == "rdma"


def test_where_a_consumer_may_go():
    assert Settings().places == ("127.0.0.0/8", "::1", "localhost", "127.0.0.1")
    assert Settings.of({"host": "192.0.2.1", "insecure": True}).places[-1] == "192.0.2.1"
    assert Settings.of({"allowed_hosts": ["10.0.0.0/8"]}).places == ("10.0.0.0/8",)
    assert Settings.of({"allowed_hosts": ["a", "*"]}).places is None
    assert Settings.of({"secret_file": "/some/file"}).places is None


def test_a_secret_is_read_from_its_file(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("sixteen bytes or more\n")
    key = Settings(secret_file=str(secret)).signing_key()
    secret.write_text("sixteen bytes or more")
    assert Settings(secret_file=str(secret)).signing_key() == key
    secret.write_text("too short")
    with pytest.raises(ConfigError, match="secret") as refused:
        Settings(secret_file=str(secret)).signing_key()
    assert "too short" not in str(refused.value)
    with pytest.raises(ConfigError, match="secret_file"):
        Settings(secret_file=str(tmp_path / "none")).signing_key()
    assert Settings().signing_key() is None


def test_beyond_loopback_only_by_name():
    assert Settings.of({"host": "192.0.2.1", "insecure": True}).host == "192.0.2.1"


def test_lists_and_ucx_are_taken_as_they_are_meant():
    settings = Settings.of({"allowed_hosts": ["a", "b"], "transports": ["tcp"], "ucx": {"one_sided": "never"}})
    assert (settings.allowed_hosts, settings.transports) == (("a", "b"), ("tcp",))
    assert settings.ucx_config() == pdkv.UcxConfig(one_sided="never")
    assert Settings().ucx_config() is None


def test_engines_that_share_a_configuration_take_ports_of_their_own():
    settings = Settings(port=5600, engine_port=6000)
    ports = [(one.port, one.engine_port) for one in (settings.of_replica(index, 4) for index in range(3))]
    assert ports == [(5600, 6000), (5601, 6004), (5602, 6008)]
    assert Settings().of_replica(3, 4) == Settings()
    with pytest.raises(ConfigError, match="`port` is `65536`"):
        Settings(port=65535).of_replica(1, 1)
    with pytest.raises(ConfigError, match="`engine_port`"):
        Settings(engine_port=65534).of_replica(0, 3)
