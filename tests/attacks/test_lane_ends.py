"""How lanes of UCX end: a peer stopped, killed or closed in the middle, forks, storms, strangers on their port.

What holds for every transport is in the other files, which run over lanes too.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress

import pytest

import chance
import pdkv
from attacks import lanes
from attacks.far import until
from attacks.test_stop import PATIENT, impatient
from attacks.test_storms import flat
from patience import follows_the_machine

LARGE = {"layers": 4, "blocks": 128, "block_bytes": 128 << 10}
WHOLE = list(range(128))
SAME = [(block, block) for block in WHOLE]
FEW = list(range(8))
ALL = [
    "ucx",
    "ucx-put",
    pytest.param("ucx-tcp", marks=pytest.mark.slow),
    pytest.param("ucx-system", marks=pytest.mark.slow),
]


def met(start, name, patience_s):
    """An owner that is stopped while a pull from it runs; returns both engines and what became of the pull."""
    owner = start("owner", name, seed=1, **PATIENT, **LARGE)
    initiator = start("initiator", name, seed=2, **impatient(patience_s), **LARGE)
    initiator.do("connect", owner.address)
    for _ in range(50):
        _, reference = owner.do("export", WHOLE, lease_s=600)
        number = initiator.do("pull", reference, WHOLE, timeout_s=300.0)
        until(lambda number=number: initiator.do("state", number) != "claiming", "the grant")
        owner.stop()
        outcome = initiator.do("outcome", number)
        if outcome["state"] != "done":
            return owner, initiator, outcome
        owner.go_on()  # everything had been said before it could be stopped
    raise AssertionError("no pull can be met on its way")


@pytest.mark.parametrize("transport", ALL)
@follows_the_machine
def test_a_stopped_owner_sends_nothing_into_memory_that_was_quiesced(start, transport, patience_s):
    owner, reader, outcome = met(start, transport, patience_s)
    assert isinstance(outcome["error"], pdkv.PeerLostError), outcome
    assert outcome["quiesced"]
    assert owner.stopped()
    reader.do("stamp", 7)
    owner.go_on()
    until(lambda: owner.do("peer_names") == [], "the loss of the link at the other end")
    assert owner.do("stats")["live_claims"] == 0
    assert reader.do("wrong", 7, SAME) == []
    reader.do("connect", owner.address)
    _, reference = owner.do("export", FEW)
    assert reader.do("try_pull", reference, FEW)["state"] == "done"
    assert reader.do("wrong", 1, SAME[:8]) == []


@pytest.mark.parametrize("transport", ALL)
@pytest.mark.parametrize("side", ["owner", "initiator"])
def test_a_pause_within_the_timeout_costs_nothing(start, transport, side):
    owner = start("owner", transport, seed=1, **PATIENT, **LARGE)
    initiator = start("initiator", transport, seed=2, **PATIENT, **LARGE)
    initiator.do("connect", owner.address)
    far = owner if side == "owner" else initiator
    for verb, pinned, seed, reader in (("pull", "export", 1, initiator), ("push", "offer", 2, owner)):
        owner.do("stamp", 1)
        initiator.do("stamp", 2)
        _, reference = owner.do(pinned, WHOLE, lease_s=600)
        number = initiator.do(verb, reference, WHOLE, timeout_s=300.0)
        far.stop()
        far.go_on()
        assert initiator.do("outcome", number)["state"] == "done"
        assert reader.do("wrong", seed, SAME) == []


@pytest.mark.parametrize("transport", ALL)
@pytest.mark.parametrize("verb", ["pull", "push"])
def test_an_engine_closed_by_its_own_process_lets_go(start, transport, verb):
    owner = start("owner", transport, seed=1, **LARGE)
    parts = [WHOLE[first : first + 32] for first in range(0, 128, 32)]
    for _ in range(3):
        initiator = start("initiator", transport, seed=2, **LARGE)
        initiator.do("connect", owner.address)
        pins = [owner.do("export" if verb == "pull" else "offer", part, lease_s=600) for part in parts]
        numbers = initiator.do("start_all", verb, [(ref, part) for (_, ref), part in zip(pins, parts, strict=True)])
        initiator.do("shut_down")
        for number in numbers:
            outcome = initiator.do("outcome", number)
            assert outcome["quiesced"]
            assert outcome["state"] == "done" or isinstance(outcome["error"], pdkv.PdkvError), outcome
        initiator.do("stamp", 7)
        until(lambda: owner.do("peer_names") == [], "the goodbye")
        assert initiator.do("wrong", 7, SAME) == []
        # A process that could write is out of the owner's blocks when it is gone, as on every transport.
        initiator.kill()
        for pin, _ in pins:
            owner.do("release", pin)
            assert owner.do("wait_quiesced", pin)
        assert owner.do("stats")["live_claims"] == 0


@pytest.mark.parametrize("transport", ALL)
def test_a_forked_child_is_refused_and_its_parent_goes_on(start, transport):
    consumer, producer = start("consumer", transport), start("producer", transport, seed=1)
    consumer.do("connect", producer.address)
    _, reference = producer.do("export", FEW, consumers=100, lease_s=600)
    assert consumer.do("try_pull", reference, FEW)["state"] == "done"
    for far in (consumer, producer):
        said = far.do("use_in_a_child", reference, FEW, producer.address)
        assert said[-1] == "exit: 0", said
        for name in ("pull", "connect", "export"):
            answer = next(line for line in said if line.startswith(f"{name}: "))
            assert "Error" in answer, said
            assert "fork" in answer, said
        assert consumer.do("pull_again_and_again", reference, SAME[:8], 1, 3) == 3


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transport", ["ucx", "ucx-put", "ucx-tcp", "ucx-tcp-put", "ucx-system", "ucx-system-put"])
def test_a_thousand_lanes(start, transport, rounds):
    consumer, producer = start("consumer", transport), start("producer", transport, seed=1)
    _, reference = producer.do("export", FEW, consumers=1000, lease_s=600)

    def turns(count):
        consumer.do("pull_after_connecting", producer.address, reference, FEW, count)
        until(lambda: producer.do("peer_names") == [], "the end of all links")

    turns(30)
    held = [(far, far.do("resources")) for far in (consumer, producer)]
    # The whole number once; elsewhere enough to see what each of them leaves behind.
    for _ in range(10):
        turns(rounds(97 if transport == "ucx" else 27))
    for far, before in held:
        flat(before, far, transport)
    assert consumer.do("wrong", 1, SAME[:8]) == []


def test_strangers_on_ucx_s_own_port(start):
    """Whoever names TCP gets a port of UCX's. What doesn't speak its protocol does no harm there."""
    lanes.need()
    owner, initiator = start("owner", "ucx-tcp", seed=1), start("initiator", "ucx-tcp")
    initiator.do("connect", owner.address)
    _, reference = owner.do("export", FEW, consumers=1000, lease_s=600)
    own = int(owner.address.rpartition(":")[2])
    ports = [port for port in owner.do("listening") if port != own]
    assert ports, "UCX listens nowhere"
    seed = chance.seed()
    print("seed", seed)  # noqa: T201 - shown when the test fails
    dice = random.Random(seed)
    for turn in range(60):
        with suppress(OSError), socket.create_connection(("127.0.0.1", dice.choice(ports)), timeout=5) as stream:
            stream.sendall(b"GET / HTTP/1.1\r\n\r\n" if turn % 4 == 0 else dice.randbytes(dice.randrange(1, 9000)))
        if turn % 20 == 0:
            assert initiator.do("pull_again_and_again", reference, SAME[:8], 1, 1) == 1
    initiator.do("reconnect", owner.address, 3)
    initiator.do("connect", owner.address)
    assert initiator.do("pull_again_and_again", reference, SAME[:8], 1, 3) == 3
