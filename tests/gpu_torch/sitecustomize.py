"""Makes `import torch` give a torch with a GPU, in this process and in those that it starts.

A folder for PYTHONPATH, not a package: Python imports a module of this name at its start. What the GPU is stands in
gpu_torch.py. The steps of gpu-check move less here than on hardware, and tell the stand-in where it is to go on by
itself: that is all that is changed of them.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

_SMALL = ("caches", "kernels", "speed", "host", "nixl", "posting", "plans", "torch_arena")
_AFTER = {"torch": "gpu_torch", **{f"gpu_check.{name}": "small_steps" for name in _SMALL}}


class _Patched(Loader):
    def __init__(self, loader, patch):
        self._loader, self._patch = loader, patch

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        importlib.import_module(self._patch).patch(module)

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None) -> ModuleSpec | None:
        if name not in _AFTER:
            return None
        sys.meta_path.remove(self)
        try:
            spec = find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None:
            spec.loader = _Patched(spec.loader, _AFTER[name])
        return spec


sys.meta_path.insert(0, _Finder())
