"""A prefill process inserts the KV of prompts into a lookup buffer; two decode processes select it by their tokens."""

import multiprocessing

import numpy as np

import pdkv

SHAPE = (64, 8, 16, 128)  # blocks, heads, tokens, K and V joined
PROMPTS = {name: np.arange(first, first + 48) for name, first in (("decode-0", 1000), ("decode-1", 2000))}
BLOCKS = {"decode-0": [5, 9, 2], "decode-1": [8, 1, 30]}


def prefill(pipe):
    pages = np.zeros(SHAPE, np.float16)
    with pdkv.Engine("prefill", listen="127.0.0.1:0") as engine, pdkv.LookupBuffer(engine) as buffer:
        pipe.send(engine.address)
        cache = engine.register_kv_cache({"layers.0": pages}, layout="BHNC", block_tokens=16)
        tickets = []
        for name, tokens in PROMPTS.items():
            pages[BLOCKS[name]] = tokens[0]
            tickets.append(buffer.insert_blocks(tokens, cache, BLOCKS[name], hidden=tokens * 0.5))
        for ticket in tickets:
            assert ticket.wait(timeout_s=60) == "taken"  # its blocks may be used again


def decode(name, address):
    pages, tokens = np.zeros(SHAPE, np.float16), PROMPTS[name]
    with pdkv.Engine(name) as engine:
        cache = engine.register_kv_cache({"layers.0": pages}, layout="BHNC", block_tokens=16)
        with pdkv.LookupBuffer(engine, engine.connect(address), library="numpy") as buffer:
            found = buffer.drop_select_into(tokens, cache, [40, 7, 33], timeout_s=60)
        assert (pages[[40, 7, 33]] == tokens[0]).all()
        assert (found.hidden == tokens * 0.5).all()
        staged = found.transfer.stats.staged_bytes
        print(f"{name}: {found.num_tokens} tokens over {found.transfer.path}, {staged} staged", flush=True)


if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    producer = spawn.Process(target=prefill, args=(theirs,))
    producer.start()
    address = ours.recv()
    consumers = [spawn.Process(target=decode, args=(name, address)) for name in PROMPTS]
    for consumer in consumers:
        consumer.start()
    for process in (producer, *consumers):
        process.join()
        assert process.exitcode == 0
