"""What stands in for a producer: answers as a real one would give, and a mint that issues readable references."""

from __future__ import annotations

import copy
import json
from itertools import count

from pdkv.connectors.core.digest import prefix_digest
from pdkv.connectors.core.producer import Exported, Producer, RankMint
from pdkv.connectors.core.reading import Reader

BLOCK_TOKENS = 16


class Mint:
    """Issues references that say what they were issued for."""

    def __init__(self, rank=0, group=0):
        self.place = {"rank": rank, "group": group}
        self.numbers = count()

    def issue(self, **facts):
        return Minted({**self.place, **facts, "digest": facts["digest"].hex(), "number": next(self.numbers)})


class Minted(dict):
    def to_json(self):
        return json.dumps(self)


def mints(ranks=1, groups=1, caches=()):
    """What mints, for each rank and cache: one for each group, unless `caches` says which group each belongs to."""
    return [RankMint([Mint(rank, at) for at in range(len(caches) or groups)], caches) for rank in range(ranks)]


def export(request_id="p-1", blocks=(range(1, 6),), tokens=range(70), *, producer=None, ranks=1, caches=()):
    """Exports a finished prompt; gives the producer's decision and its answer."""
    blocks = tuple(list(ids) for ids in blocks)
    if producer is None:
        producer = Producer("engine-p", [BLOCK_TOKENS] * len(blocks), 30.0)
    tokens = list(tokens)
    finished = Exported(request_id, blocks, len(tokens), prefix_digest(tokens, len(tokens)))
    minting = mints(ranks, len(blocks), caches)
    return producer.export(finished, minting, "127.0.0.1", 5600, tp_size=ranks, pp_size=1)


def answer(request_id="p-1", blocks=(range(1, 6),), tokens=range(70), **how):
    """The parameters of such an answer as they come out of HTTP."""
    delay, params = export(request_id, blocks, tokens, **how)
    assert delay
    return json.loads(json.dumps(params))


def changed(params, path, value):
    """A copy of the parameters in which the field at `path` holds `value`."""
    params = copy.deepcopy(params)
    at = params
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return params


def read(params, num_prompt_tokens, *, groups=1, ranks=1, key=None, caches=None):
    """Reads parameters as a consumer with so many groups and ranks does, and so many caches of each rank."""
    reader = Reader([BLOCK_TOKENS] * groups, tp_size=ranks, pp_size=1, key=key)
    if caches is not None:
        reader.expect(caches)
    return reader.read(params, num_prompt_tokens)
