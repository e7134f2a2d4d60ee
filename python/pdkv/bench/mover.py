"""What takes part in a measurement: something that fills, moves and checks bytes, once per turn.

Knows neither pages nor engines; `limits` has those that move a case's pages, `pipe` those that move tensors.
"""

from __future__ import annotations

from pdkv.errors import UnsupportedError


class Mover:
    """One that is measured in turn with others.

    Attributes:
        kind: `pdkv`; `limit` for a loop with nothing around it; `peer` for another program.
        name: What its row says.
        note: What a reader of the row must know beside that.
        checked: Whether what it moves can be checked.
    """

    kind = "peer"
    name = ""
    note = ""
    checked = True

    def fill(self, stamp: int) -> None:
        """Writes fresh bytes where `run` takes them from."""

    def run(self) -> float:
        """Moves everything once; gives the seconds it took.

        Raises:
            PdkvError: It failed.
        """
        raise UnsupportedError(f"`{self.name}` moves nothing")

    def count_wrong(self, stamp: int) -> int:
        """Gives how many bytes of what `run` moved are wrong; names the first of them on stderr."""
        raise UnsupportedError(f"what `{self.name}` moves can't be checked for stamp `{stamp}`")

    def close(self) -> None:
        """Gives everything back."""
