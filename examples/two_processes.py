"""A prefill process hands three blocks of KV cache to a decode process, which checks every value."""

import multiprocessing

import numpy as np

import pdkv

LAYERS = {f"layers.{layer}": (64, 8, 16, 128) for layer in range(4)}  # blocks, heads, tokens, K and V joined
PROMPT = b"what both sides compute from the prompt's tokens"


def prefill(pipe):
    kv = {name: np.zeros(shape, np.float16) for name, shape in LAYERS.items()}
    with pdkv.Engine("prefill", listen="127.0.0.1:0") as engine:
        cache = engine.register_kv_cache(kv, layout="BHNC", block_tokens=16)
        for layer, pages in enumerate(kv.values()):
            pages[[5, 9, 2]] = layer + 1  # the prompt's KV, wherever the allocator put it
        export = cache.export([5, 9, 2], num_tokens=48, digest=PROMPT, lease_s=30)
        pipe.send_bytes(export.reference.to_json().encode())  # travels with the request
        assert export.wait(timeout_s=30) == "done"  # claimed, moved, acknowledged: the blocks may be reused


def decode(pipe):
    kv = {name: np.zeros(shape, np.float16) for name, shape in LAYERS.items()}
    with pdkv.Engine("decode") as engine:
        cache = engine.register_kv_cache(kv, layout="BHNC", block_tokens=16)
        reference = pdkv.Reference.from_json(pipe.recv_bytes().decode())
        engine.connect(reference.address, timeout_s=5)
        transfer = cache.pull(reference, into=[40, 7, 33], digest=PROMPT)  # our own pages
        transfer.wait(timeout_s=10)
        assert all((pages[[40, 7, 33]] == layer + 1).all() for layer, pages in enumerate(kv.values()))
        print(f"{transfer.stats.bytes} bytes over {transfer.path}, {transfer.stats.staged_bytes} staged")


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    producer = spawn.Process(target=prefill, args=(ours,))
    producer.start()
    decode(theirs)
    producer.join()
