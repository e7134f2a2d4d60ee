"""Pipes: tensors in order between two processes, with the faces of vLLM 0.8's `kv_pipe`.

`PdkvPipe` stands where `PyNcclPipe` or `MooncakePipe` stood. `Pipe` is the same over engines that you have already.
"""

from pdkv.pipe.config import PipeConfig
from pdkv.pipe.drop_in import PdkvPipe
from pdkv.pipe.pipe import BrokenPipeException, Pipe

__all__ = ["BrokenPipeException", "PdkvPipe", "Pipe", "PipeConfig"]
