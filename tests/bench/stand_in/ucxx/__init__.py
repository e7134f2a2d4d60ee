"""A stand-in for the bindings, over plain sockets: what `ucxx_end` calls and no more. `STAND_IN` makes it misbehave."""

__version__ = "0.stand-in"
