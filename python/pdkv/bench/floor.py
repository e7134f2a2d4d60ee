"""One promise of speed and what was measured of it. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Floor:
    """One promise and what was measured. `ok` is `None` where it could not be measured; `note` says why."""

    name: str
    bound: str
    value: str
    ok: bool | None
    note: str = ""

    def to_json(self) -> dict[str, object]:
        """Gives plain values."""
        return asdict(self)

    def cells(self) -> list[str]:
        """Gives a line of the table."""
        return [self.name, self.bound, self.value, {True: "pass", False: "MISS", None: "-"}[self.ok], self.note]


def checked(note: str, wrong: int) -> str:
    """Puts wrong bytes, if there were any, before everything else."""
    return f"{wrong} WRONG; {note}" if wrong else note
