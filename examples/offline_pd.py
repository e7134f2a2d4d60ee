"""The first recipe for disaggregated prefill, with torch alone: one program, which starts both ranks.

Both have the same prompts and the same model, a small one with real attention over a paged cache. That with
rank 0 runs the prompts and inserts keys, values and hidden states; that with rank 1 selects them, skips the prompts'
forward pass and decodes. It checks its tokens against those of a run that does everything itself.

    make torch
    .venv-torch/bin/python examples/offline_pd.py [PORT]
"""

import json
import multiprocessing
import sys

import torch

from pdkv.lookup_buffer import SimpleBuffer
from pdkv.pipe import PdkvPipe, PipeConfig

# What goes behind `--kv-transfer-config` of vLLM 0.8 on the prefill side.
PREFILL = '{"kv_connector":"PyNcclConnector","kv_role":"kv_producer","kv_rank":0,"kv_parallel_size":2}'
DECODE = '{"kv_connector":"PyNcclConnector","kv_role":"kv_consumer","kv_rank":1,"kv_parallel_size":2}'

PROMPTS = ["Hello, my name is", "The president of the United States is", "Paged caches decode in order " * 9]
NEW_TOKENS = 24
LAYERS, HEADS, HEAD_DIM, VOCABULARY = 4, 4, 32, 256
HIDDEN = HEADS * HEAD_DIM
NUM_BLOCKS, BLOCK_TOKENS = 64, 16


class Model:
    """A decoder with random weights, the same in every process."""

    def __init__(self):
        source = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, HIDDEN, generator=source)
        self.position = torch.randn(1024, HIDDEN, generator=source)
        self.layers = torch.randn(LAYERS, 4, HIDDEN, HIDDEN, generator=source) / HIDDEN**0.25
        self.head = torch.randn(HIDDEN, VOCABULARY, generator=source)
        # As vLLM 0.8 lays it out: K or V, block, token, head, content.
        self.caches = [torch.zeros(2, NUM_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_DIM) for _ in range(LAYERS)]

    def forward(self, tokens, start, table):
        """The hidden states of `tokens`, which stand at `start` in their sequence; fills the pages of `table`."""
        where = torch.arange(start, start + len(tokens))
        slots = slots_of(table, start + len(tokens))
        x = self.embedding[tokens] + self.position[where]
        causal = torch.arange(start + len(tokens)) <= where[:, None]
        for (query, key, value, out), cache in zip(self.layers, self.caches, strict=True):
            pages = cache.view(2, -1, HEADS, HEAD_DIM)
            pages[0, slots[start:]] = (x @ key).view(-1, HEADS, HEAD_DIM)
            pages[1, slots[start:]] = (x @ value).view(-1, HEADS, HEAD_DIM)
            keys, values = pages[:, slots]
            scores = torch.einsum("qhd,khd->hqk", (x @ query).view(-1, HEADS, HEAD_DIM), keys) / HEAD_DIM**0.5
            weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
            x = torch.layer_norm(x + torch.einsum("hqk,khd->qhd", weights, values).flatten(1) @ out, [HIDDEN])
        return x

    def next_token(self, hidden):
        """The likeliest token after the last of these hidden states."""
        return (hidden[-1] @ self.head).argmax().view(1)

    def decode(self, hidden, length, table):
        """The tokens after a prompt of `length`, whose pages are filled and whose last hidden states are known."""
        token = self.next_token(hidden)
        found = [token.item()]
        for position in range(length, length + NEW_TOKENS - 1):
            token = self.next_token(self.forward(token, position, table))
            found.append(token.item())
        return found


def slots_of(table, length):
    """Where the first `length` tokens of a sequence are, counted over all blocks."""
    index = torch.arange(length)
    return table[index // BLOCK_TOKENS] * BLOCK_TOKENS + index % BLOCK_TOKENS


def sequences():
    """The tokens of each prompt, and blocks for it wherever the allocator found some."""
    free = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)).split(NUM_BLOCKS // len(PROMPTS))
    return [(torch.tensor(list(text.encode())), table) for text, table in zip(PROMPTS, free, strict=False)]


def run(config, port):
    config = PipeConfig.from_cli(json.dumps(json.loads(config) | port))
    data = PdkvPipe(local_rank=0, config=config, device="cpu")
    signal = PdkvPipe(local_rank=0, config=config, device="cpu", port_offset=1)
    buffer = SimpleBuffer(signal, data, config.kv_buffer_size)
    model = Model()
    for tokens, table in sequences():
        slots = slots_of(table, len(tokens))
        everything = torch.ones(len(tokens), dtype=torch.bool)
        if config.is_kv_producer:
            hidden = model.forward(tokens, 0, table)
            pages = [cache.view(2, -1, HEADS, HEAD_DIM)[:, slots] for cache in model.caches]
            keys, values = torch.stack(pages, 1)
            buffer.insert(tokens, everything, keys, values, hidden)
        else:
            _, _, keys, values, hidden = buffer.drop_select(tokens, everything)
            for cache, key, value in zip(model.caches, keys, values, strict=True):
                cache.view(2, -1, HEADS, HEAD_DIM)[:, slots] = torch.stack([key, value])
            found = model.decode(hidden, len(tokens), table)
            alone = Model()
            assert found == alone.decode(alone.forward(tokens, 0, table), len(tokens), table)
            print(f"{len(tokens)} prompt tokens received, {len(found)} tokens equal to those of one process")
    buffer.close()
    data.close()
    signal.close()


if __name__ == "__main__":
    port = {"kv_port": int(sys.argv[1])} if len(sys.argv) > 1 else {}
    prefill = multiprocessing.get_context("spawn").Process(target=run, args=(PREFILL, port))
    prefill.start()
    run(DECODE, port)
    prefill.join()
    sys.exit(prefill.exitcode)
