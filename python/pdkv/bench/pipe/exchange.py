"""What a pipe is measured with: an `Exchange` of equal tensors, and the `Way` they go. Pure; both travel as JSON."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import asdict, dataclass, field

from pdkv.bench.cases import TRANSPORTS, fields_of
from pdkv.bench.presets import ITEM_BYTES
from pdkv.bench.ucx import Ucx
from pdkv.errors import ConfigError

SHAPE = (80, 2048, 8, 128)  # all keys, or all values, of 2,048 tokens of `llama-3.3-70b`
SMALL_BYTES = 1024
LIBRARIES = ("torch", "numpy")
_BY_SIZE = {1: "uint8", 2: "uint16", 4: "uint32"}
_MAX_DIMENSIONS = 8
_MAX_BYTES = 1 << 40
_MAX_COUNT = 1 << 20


@dataclass(frozen=True, slots=True)
class Exchange:
    """Some tensors that are sent one after another and received as such.

    Attributes:
        shape: Of each tensor.
        dtype: A key of `ITEM_BYTES`.
        count: How many tensors.
        library: What they are: `torch` tensors, or `numpy` arrays of unsigned numbers as wide as the dtype.
        threads: For filling and checking.
        seed: Draws the bytes.
    """

    shape: tuple[int, ...]
    dtype: str
    count: int
    library: str
    threads: int
    seed: int

    def __post_init__(self) -> None:
        for what, value, allowed in (("dtype", self.dtype, ITEM_BYTES), ("library", self.library, LIBRARIES)):
            if value not in allowed:
                raise ConfigError(f"`{value}` is no `{what}`", hint=f"use one of {', '.join(allowed)}")
        if not 1 <= len(self.shape) <= _MAX_DIMENSIONS or min(self.shape) < 1:
            raise ConfigError(
                f"`{list(self.shape)}` is no shape to measure",
                hint=f"give 1 to {_MAX_DIMENSIONS} extents of at least 1",
            )
        if not 1 <= self.count <= _MAX_COUNT:
            raise ConfigError(f"`{self.count}` tensors, between 1 and {_MAX_COUNT} are possible")
        if self.total_bytes > _MAX_BYTES:
            raise ConfigError(
                f"`{self.total_bytes}` bytes are more than `{_MAX_BYTES}`", hint="use a smaller `--shape`"
            )

    @property
    def dtype_name(self) -> str:
        """The dtype as the library names it: numpy has no bfloat16."""
        return self.dtype if self.library == "torch" else _BY_SIZE[ITEM_BYTES[self.dtype]]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of one tensor."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.count * self.tensor_bytes

    def label(self) -> str:
        """Says what it is in a row."""
        extents = ", ".join(map(str, self.shape))
        return f"{self.count:,} x [{extents}] {self.dtype_name}"

    def to_json(self) -> dict[str, object]:
        """Gives plain values for the control channel."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Exchange:
        """Reads `to_json` back; everything is checked, since it comes from another process.

        Raises:
            ConfigError: A field is missing, unknown, or of the wrong kind.
        """
        plain = fields_of(value, cls)
        shape = plain["shape"]
        if not isinstance(shape, list | tuple) or not all(type(extent) is int for extent in shape):
            raise ConfigError(f"`{shape!r}` is no shape")
        return cls(**{**plain, "shape": tuple(shape)})  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Way:
    """The transport an exchange goes by, and what the engines of both ends have in common.

    Attributes:
        transport: The only one that the engines have.
        threads: Copy threads of each engine, and of the limit.
        streams: TCP streams, and those of the limit.
        ucx: How UCX is used, by the transport of that name and by its limit.
    """

    transport: str
    threads: int
    streams: int
    ucx: Ucx = field(default_factory=Ucx)

    def __post_init__(self) -> None:
        between = [name for name in TRANSPORTS if name not in ("auto", "inproc")]
        if self.transport not in between:
            raise ConfigError(
                f"`{self.transport}` is no transport between two processes", hint=f"use {', '.join(between)}"
            )

    def to_json(self) -> dict[str, object]:
        """Gives plain values for the control channel."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Way:
        """Reads `to_json` back.

        Raises:
            ConfigError: A field is missing, unknown, or of the wrong kind.
        """
        plain = fields_of(value, cls)
        return cls(**{**plain, "ucx": Ucx(**fields_of(plain["ucx"], Ucx))})  # type: ignore[arg-type]


def has_torch() -> bool:
    """Says whether torch is installed here, without importing it."""
    return importlib.util.find_spec("torch") is not None


def installed_library() -> str:
    """Names what tensors are made with here: torch where it is installed, else numpy."""
    return "torch" if has_torch() else "numpy"
