"""What the steps of gpu-check move where no GPU does it, and what makes the stand-in go on as one does."""

from __future__ import annotations

import functools
import importlib


def patch(module):
    """Makes a step small."""
    if module.__name__ == "gpu_check.speed":
        module.BLOCK_BYTES, module.TOTAL_BYTES = (4 << 10, 16 << 10, 256 << 10), 1 << 20
    elif module.__name__ == "gpu_check.host":
        module.BLOCK_BYTES, module.TOTAL_BYTES = (16 << 10, 256 << 10), 1 << 20
    elif module.__name__ == "gpu_check.nixl":
        module.BLOCK_BYTES, module.TOTAL_BYTES = (16 << 10,), 1 << 20
    elif module.__name__ == "gpu_check.posting":
        module.LAYERS = (1, 4)
    elif module.__name__ == "gpu_check.plans":
        module._LEAST = 10
    elif module.__name__ == "gpu_check.caches":
        sizes = {"layers": 4, "blocks": 190, "heads": 8, "tokens": 16, "content": 128}  # 24 MiB: two segments
        pair = module.Geometry(order="LBNHC", **sizes), module.Geometry(order="LBHNC", **sizes)
        module.large_pair = lambda: pair
    elif module.__name__ == "gpu_check.torch_arena":
        module.TorchArena.going = importlib.import_module("gpu_check.dry_arena").DryArena.going
    elif module.__name__ == "gpu_check.kernels":
        module.run = functools.partial(module.run, small=True)
