import pytest

from pdkv.bench import presets
from pdkv.errors import ConfigError

# Bytes a token needs in all layers: layers * kv heads * 2 * head dim * 2, from the published configs.
TOKEN_BYTES = {
    "tiny": 4 * 2 * 2 * 32 * 2,
    "llama-3.1-8b": 131_072,
    "llama-3.3-70b": 327_680,
    "qwen3-32b": 262_144,
    "deepseek-v3": 70_272,
    "gpt-oss-120b": 73_728,
}


def test_every_preset_has_the_published_size_and_a_source():
    assert {name: geometry.token_bytes() for name, geometry in presets.PRESETS.items()} == TOKEN_BYTES
    for geometry in presets.PRESETS.values():
        assert geometry.source.startswith("https://huggingface.co/") or geometry.name == "tiny"


def test_mla_has_one_head_and_no_separate_values():
    geometry = presets.preset("deepseek-v3")
    assert (geometry.kv_heads, geometry.content) == (1, 512 + 64)


def test_unknown_models_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="`gpt-2`") as caught:
        presets.preset("gpt-2")
    assert "llama-3.1-8b" in caught.value.hint


def test_custom_geometry():
    assert presets.custom(2, 4, 64, "float8_e4m3fn").page_bytes(16) == 4 * 16 * 128
    for bad in ((0, 1, 1, "bfloat16"), (1, 0, 1, "bfloat16"), (1, 1, 0, "bfloat16"), (1, 1, 1, "int4")):
        with pytest.raises(ConfigError):
            presets.custom(*bad)


def test_a_raw_block_is_exactly_its_bytes():
    assert presets.raw(4096).page_bytes(1) == 4096
