"""Tensors of a GPU through a store and a lookup buffer, by pinned memory: down at the one end, up at the other."""

from __future__ import annotations

import torch

import pdkv

PLACE = "cuda:0"


def made(number):
    """A tensor on the GPU, with bytes of its own."""
    return torch.arange(96, dtype=torch.float32).mul(number).view(2, 48).to(PLACE)


def same(found, number):
    """Whether it is that tensor, in memory of its own on the GPU."""
    assert str(found.device) == PLACE
    assert torch.equal(found.cpu(), made(number).cpu())


def main():
    with pdkv.Engine("one") as one, pdkv.Engine("other") as other:
        peer = other.connect(one.address)
        with pdkv.KVStore(one, device=PLACE) as kept, pdkv.KVStore(other, [peer], device=PLACE) as asking:
            tensor = made(3)
            kept.put("prompt", tensor)
            assert kept.get("prompt") is tensor
            found = asking.get("prompt", timeout_s=60)
            same(found, 3)
            assert found.data_ptr() != tensor.data_ptr()
        with pdkv.LookupBuffer(one) as produced, pdkv.LookupBuffer(other, peer, device=PLACE) as consumed:
            tokens = torch.arange(48).to(PLACE)
            produced.insert(tokens, None, made(1), made(2), None)
            found, roi, key, value, hidden = consumed.drop_select(tokens, None, timeout_s=60)
            assert torch.equal(found.cpu(), tokens.cpu())
            assert roi is hidden is None
            same(key, 1)
            same(value, 2)


main()
