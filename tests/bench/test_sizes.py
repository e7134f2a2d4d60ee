import pytest

from pdkv.bench import sizes
from pdkv.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("4KiB", 4096),
        ("4kib", 4096),
        ("4 KiB", 4096),
        ("64kB", 64_000),
        ("1.5GiB", 3 << 29),
        ("0.5KiB", 512),
        ("512MiB", 512 << 20),
        ("2Ti", 2 << 40),
    ],
)
def test_sizes_are_read(text, size):
    assert sizes.parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "KiB", "-4KiB", "4 KiB extra", "0", "0.3B", "4XB", "1e3", "2PiB", "9999TiB", "٤KiB"]
)
def test_other_texts_are_refused_by_name(text):
    with pytest.raises(ConfigError, match="is not a"):
        sizes.parse_size(text)


@pytest.mark.parametrize("size", [1, 1023, 4096, 65536, 512 << 20, 3 << 30])
def test_exact_sizes_survive_a_round_trip(size):
    assert sizes.parse_size(sizes.format_size(size)) == size or size % 1024


def test_uneven_sizes_are_shown_with_one_decimal():
    assert sizes.format_size(1536 << 10 | 1) == "1.5MiB"


def test_lists_refuse_empty_entries():
    assert sizes.parse_list("4KiB, 1MiB", sizes.parse_size) == [4096, 1 << 20]
    for text in ("", ",", "4KiB,", "4KiB,,1MiB"):
        with pytest.raises(ConfigError, match="empty entry"):
            sizes.parse_list(text, sizes.parse_size)


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "x", "", "²"])
def test_counts_are_whole_and_positive(text):
    with pytest.raises(ConfigError):
        sizes.parse_count(text)
