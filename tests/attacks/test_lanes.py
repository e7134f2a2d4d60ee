"""Two processes with nothing but a lane of UCX between them: bytes both ways, and what the path says."""

from __future__ import annotations

import itertools

import pytest

import pdkv
from attacks import lanes

SIZE = {"layers": 3, "blocks": 64, "block_bytes": 16 << 10}
COPIES = ("libucx", "nixl", "system")


def every(tls=lanes.TLS, manners=tuple(lanes.MANNERS)):
    """Transport, manner and copy: the copy that the search finds, and with the slow tests each one."""
    for which, manner in itertools.product(tls, manners):
        yield pytest.param(which, manner, None, id=f"{which}-{manner}")
        for copy in COPIES:
            yield pytest.param(which, manner, copy, id=f"{which}-{manner}-{copy}", marks=pytest.mark.slow)


def pair(start, tls, manner, copy=None, **settings):
    lanes.need(copy)
    size = {**SIZE, **settings}
    owner = start("owner", "ucx", seed=1, **{**lanes.lane(tls, manner, copy), **size})
    initiator = start("initiator", "ucx", seed=2, **{**lanes.lane(tls, manner, copy), **size})
    return owner, initiator, initiator.do("connect", owner.address)


def moved(outcome, tls, manner):
    """The transfer is done, by the lane that was asked for, and the path says over what."""
    assert outcome["state"] == "done", outcome
    assert (outcome["path"], outcome["rdma"]) == ("ucx", False)
    how, _, over = outcome["detail"].partition(" over ")
    assert how == {"put": "put/get", "am": "active messages"}[manner], outcome["detail"]
    over = over.partition(", UCX")[0]
    named = {name.partition("/")[0] for name in over.split(" and ")}
    assert named <= set(tls.split(",")) or tls == "all", outcome["detail"]


@pytest.mark.parametrize(("tls", "manner", "copy"), list(every()))
def test_bytes_both_ways(start, tls, manner, copy):
    owner, initiator, peer = pair(start, tls, manner, copy)
    whole = list(range(64))
    there, here = whole[::-2], whole[1::2]  # scattered, and in another order at either end
    pairs = list(zip(there, here, strict=True))
    _, reference = owner.do("export", there)
    moved(initiator.do("try_pull", reference, here, require="ucx"), tls, manner)
    assert initiator.do("wrong", 1, pairs) == []
    # What was not asked for is as it was.
    rest = [block for block in whole if block not in here]
    assert initiator.do("wrong", 2, [(block, block) for block in rest]) == []

    # Some of an export, some of the layers.
    initiator.do("stamp", 2)
    _, reference = owner.do("export", whole)
    outcome = initiator.do("try_pull", reference, [5, 6], first_block=10, layers=(1, 1))
    moved(outcome, tls, manner)
    assert initiator.do("wrong", 1, [(10, 5), (11, 6)], [1]) == []
    assert initiator.do("wrong", 2, [(5, 5), (6, 6)], [0, 2]) == []

    # The other direction.
    initiator.do("stamp", 3)
    _, offer = owner.do("offer", there)
    number = initiator.do("push", offer, here, require="ucx")
    moved(initiator.do("outcome", number), tls, manner)
    assert owner.do("wrong", 3, [(ours, theirs) for theirs, ours in pairs]) == []
    assert owner.do("wrong", 1, [(block, block) for block in whole if block not in there]) == []

    # Raw reads and writes of odd pieces.
    theirs = owner.do("lend", 1 << 20, 4)
    initiator.do("lend", 1 << 20, 5)
    pieces = [(0, 4200, 8), (64, 128, 4000), (8192, 100_000, 70_000), (500_000, 8, 1), (600_000, 300_000, 200_000)]
    moved(initiator.do("raw", "read", peer, theirs, pieces), tls, manner)
    assert initiator.do("lent_wrong", 5, [(mine, far, length, 4) for mine, far, length in pieces]) == []
    initiator.do("relend", 6)
    moved(initiator.do("raw", "write", peer, theirs, pieces), tls, manner)
    assert owner.do("lent_wrong", 4, [(far, mine, length, 6) for mine, far, length in pieces]) == []


@pytest.mark.slow
@pytest.mark.parametrize(("tls", "manner"), list(itertools.product(("posix,cma", "tcp"), lanes.MANNERS)))
def test_more_than_a_quarter_gibibyte(start, tls, manner):
    owner, initiator, _ = pair(start, tls, manner, layers=2, blocks=80, block_bytes=2 << 20)
    whole = list(range(80))
    _, reference = owner.do("export", whole)
    moved(initiator.do("try_pull", reference, whole[::-1], timeout_s=90.0), tls, manner)
    assert initiator.do("wrong", 1, list(zip(whole, whole[::-1], strict=True))) == []


@pytest.mark.parametrize(
    ("tls", "policy", "says"),
    [
        ("posix,cma", "kernel", "put/get over cma/memory"),
        ("sysv,cma", "kernel", "put/get over cma/memory"),
        ("posix,cma", "rdma", "active messages over posix/memory"),
        ("tcp", "kernel", "`one_sided` is `kernel`"),
        ("tcp", "rdma", "active messages over tcp/"),
        ("tcp", "any", "put/get over tcp/"),
    ],
)
def test_policies(start, tls, policy, says):
    copy = next((name for name in ("nixl", "libucx") if name in lanes.COPIES), None)
    if policy == "kernel" and copy is None:
        pytest.skip("UCX before 1.16 does not say how it puts, so nothing counts as the kernel's doing")
    owner, initiator, _ = pair(start, tls, policy, copy)
    _, reference = owner.do("export", [1, 2])
    outcome = initiator.do("try_pull", reference, [3, 4])
    assert outcome["state"] == "done"
    assert says in outcome["detail"]
    assert outcome["path"] == "ucx"
    _, reference = owner.do("export", [1, 2])
    outcome = initiator.do("try_pull", reference, [3, 4], require="rdma")
    assert isinstance(outcome["error"], pdkv.UnsupportedError)
    assert "ucx: not RDMA" in str(outcome["error"])


def test_the_environment_chooses_where_nobody_else_does(start):
    lanes.need()
    both = {"ucx": pdkv.UcxConfig(), "environment": {"UCX_TLS": "sysv"}}
    owner, initiator = start("owner", "ucx", seed=1, **both), start("initiator", "ucx", **both)
    initiator.do("connect", owner.address)
    _, reference = owner.do("export", [1, 2])
    outcome = initiator.do("try_pull", reference, [3, 4], require="ucx")
    assert "active messages over sysv/memory" in outcome["detail"], outcome
    assert initiator.do("wrong", 1, [(1, 3), (2, 4)]) == []


def test_by_default_nobody_listens_but_the_engine(start):
    """UCX's TCP would write wherever a packet says, so no lane has it unless it is named."""
    lanes.need()
    owner, initiator = (start(name, "ucx", ucx=pdkv.UcxConfig()) for name in ("owner", "initiator"))
    initiator.do("connect", owner.address)
    _, reference = owner.do("export", [1, 2])
    assert initiator.do("try_pull", reference, [3, 4], require="ucx")["state"] == "done"
    for far in (owner, initiator):
        assert far.do("listening") == [int(far.address.rpartition(":")[2])]
