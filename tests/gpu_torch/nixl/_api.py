"""Two agents of NIXL that copy by the stand-in's copies. What a caller gives them is as strict as in NIXL 1.5."""

from __future__ import annotations

from typing import ClassVar

import gpu_torch


class nixl_agent:  # noqa: N801 - NIXL's name
    """Knows what was registered, in this process."""

    _known: ClassVar[dict[str, nixl_agent]] = {}

    def __init__(self, agent_name, nixl_conf=None, instantiate_all=False):
        self._name, self._ranges = agent_name, []
        self._known[agent_name] = self

    def register_memory(self, reg_list, mem_type=None, backends=()):
        assert reg_list.is_cuda, "a tensor on a GPU"
        self._ranges.append((reg_list.data_ptr(), reg_list.numel() * reg_list.element_size()))
        return self._ranges

    def get_agent_metadata(self):
        return self._name.encode()

    def add_remote_agent(self, metadata):
        return metadata.decode()

    def get_xfer_descs(self, descs, mem_type=None):
        assert mem_type == "VRAM"
        assert all(len(one) == 3 and one[2] == 0 for one in descs)
        return list(descs)

    def initialize_xfer(self, operation, local_descs, remote_descs, remote_agent, notif_msg=b"", backends=()):
        assert operation == "READ"
        assert [size for _, size, _ in local_descs] == [size for _, size, _ in remote_descs]
        self._inside(local_descs)
        self._known[remote_agent]._inside(remote_descs)
        return [local_descs, remote_descs]

    def _inside(self, descs):
        start, size = self._ranges[0]
        assert all(start <= at and at + length <= start + size for at, length, _ in descs)

    def transfer(self, handle, notif_msg=b""):
        for (dst, size, _), (src, _, _) in zip(*handle, strict=True):
            gpu_torch._driver.copy(dst, src, size, 0)
        return "PROC"

    def check_xfer_state(self, handle):
        gpu_torch._synchronize()
        return "DONE"
