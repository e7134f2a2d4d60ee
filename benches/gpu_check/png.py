"""A PNG of lines and plain text with the standard library alone, for machines without matplotlib."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

Colour = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)

# Letters of 3 by 5 dots, a row a digit in base 8; small letters are shown as capitals.
_GLYPHS = {
    "0": "75557", "1": "26227", "2": "71747", "3": "71717", "4": "55711", "5": "74717", "6": "74757", "7": "71222",
    "8": "75757", "9": "75717", "A": "25755", "B": "65656", "C": "34443", "D": "65556", "E": "74647", "F": "74644",
    "G": "34553", "H": "55755", "I": "72227", "J": "11152", "K": "55655", "L": "44447", "M": "57755", "N": "65555",
    "O": "25552", "P": "65644", "Q": "25563", "R": "65655", "S": "34216", "T": "72222", "U": "55557", "V": "55552",
    "W": "55775", "X": "55255", "Y": "55222", "Z": "71247", ".": "00002", ",": "00024", "/": "11244", "-": "00700",
    ":": "02020", "(": "12221", ")": "42224", "%": "51245", "=": "07070", "_": "00007", "*": "05250", "'": "22000",
    "+": "02720", "×": "05250",
}  # fmt: skip


class Canvas:
    """A picture of coloured dots; what is drawn outside of it is left out."""

    def __init__(self, width: int, height: int) -> None:
        """Starts white."""
        self.width, self.height = width, height
        self._dots = bytearray(bytes(WHITE) * (width * height))

    def dot(self, x: int, y: int, colour: Colour) -> None:
        """Sets one dot."""
        if 0 <= x < self.width and 0 <= y < self.height:
            at = 3 * (y * self.width + x)
            self._dots[at : at + 3] = bytes(colour)

    def rectangle(self, x: int, y: int, width: int, height: int, colour: Colour) -> None:
        """Fills a rectangle."""
        for row in range(y, y + height):
            for column in range(x, x + width):
                self.dot(column, row, colour)

    def line(self, start: tuple[float, float], end: tuple[float, float], colour: Colour, width: int = 1) -> None:
        """Draws a straight line."""
        (x0, y0), (x1, y1) = start, end
        steps = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for step in range(steps + 1):
            x, y = x0 + (x1 - x0) * step / steps, y0 + (y1 - y0) * step / steps
            self.rectangle(round(x), round(y), width, width, colour)

    def text(self, x: int, y: int, words: str, colour: Colour = (40, 40, 40), scale: int = 2) -> int:
        """Writes words to the right of a point; gives where they end."""
        for letter in words.upper():
            for row, bits in enumerate(_GLYPHS.get(letter, "00000")):
                for column in range(3):
                    if int(bits) & 4 >> column:
                        self.rectangle(x + column * scale, y + row * scale, scale, scale, colour)
            x += 4 * scale
        return x

    def save(self, path: Path) -> None:
        """Writes the file."""
        stride = 3 * self.width
        rows = b"".join(b"\0" + self._dots[at : at + stride] for at in range(0, len(self._dots), stride))
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        parts = [(b"IHDR", head), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in parts))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
