"""Stand-ins for a lookup buffer and its index: lists that are searched from the front."""

from types import SimpleNamespace

import numpy as np


class Index:
    def __init__(self):
        self.entries, self.next = {}, 0

    def insert(self, tokens):
        self.entries[self.next] = tokens.tolist()
        self.next += 1
        return self.next - 1

    def find(self, tokens):
        wanted = tokens.tolist()
        return next(((number, len(wanted)) for number, tokens in self.entries.items() if tokens == wanted), None)

    def take(self, number):
        assert number in self.entries

    def remove(self, number):
        del self.entries[number]


def buffers(world):
    """Gives the class; buffers of one name are one, whichever engine they are made with."""
    shelves = {}

    class LookupBuffer:
        def __init__(self, engine=None, peer=None, *, name="", max_bytes=0, library=None, timeout_s=30.0):
            self.entries = [] if engine is None else shelves.setdefault(name, [])
            self.consumer = peer is not None
            world.open_buffers += 1

        def insert(self, *entry):
            assert not self.consumer
            self.entries.append(entry)

        def drop_select(self, tokens, roi, timeout_s=None):
            for i, entry in enumerate(self.entries):
                if np.array_equal(np.asarray(entry[0])[np.asarray(entry[1])], np.asarray(tokens)[np.asarray(roi)]):
                    found = list(self.entries.pop(i))
                    if world.fault == "other entry":
                        found[2] = found[2] + 1
                    return found
            raise AssertionError("nothing matches")

        def insert_blocks(self, tokens, cache, ids):
            self.entries.append((tokens, cache, ids))
            return SimpleNamespace(wait=lambda timeout_s: "taken")

        def drop_select_into(self, tokens, cache, ids, timeout_s=None, require=None, pull_timeout_s=None):
            theirs, source, source_ids = self.entries.pop(0)
            matched = len(theirs) - (world.fault == "short match")
            transfer = cache._between(source, source_ids, cache, ids)
            return SimpleNamespace(num_tokens=matched, num_blocks=len(ids), transfer=transfer)

        def close(self):
            self.entries.clear()
            world.open_buffers -= 1

    return LookupBuffer
