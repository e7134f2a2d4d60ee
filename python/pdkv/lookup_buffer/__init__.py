"""Lookup buffers: KV of prompts, inserted at one end and selected by tokens at others; and tensors by name.

`LookupBuffer` is the thing itself, `SimpleBuffer` stands where vLLM 0.8's class of that name stood, `KVStore` where its
`KVStoreBufferBase` did.
"""

from pdkv.lookup_buffer.blocks import BlockMatch, BlockTicket
from pdkv.lookup_buffer.buffer import LookupBuffer
from pdkv.lookup_buffer.selection import Selection
from pdkv.lookup_buffer.simple import SimpleBuffer
from pdkv.lookup_buffer.store import KVStore

__all__ = ["BlockMatch", "BlockTicket", "KVStore", "LookupBuffer", "Selection", "SimpleBuffer"]
