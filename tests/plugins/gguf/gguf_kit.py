"""Tiny GGUF files of random models, and the tokenizer of the shipped teacher, written by the package gguf."""

import json
from pathlib import Path

import gguf
import numpy as np

from kdtrain.models.tokenizer import load_tokenizer
from kdtrain.testing import tiny_model

TOKENIZER = Path(__file__).resolve().parents[3] / "teachers/stdlib-5m"
SPECIAL = 3


def tiny(kind="llama", vocab_size=2048, **config):
    """Make a random model; its biases and norms are random too, where transformers makes them 0 and 1."""
    model = tiny_model(kind, vocab_size, seed=3, **config).eval()
    rng = np.random.default_rng(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += parameter.new_tensor(0.2 * rng.standard_normal(len(parameter)))
    return model


def write_gguf(path, model, *, values=(), without=(), tensors=(), kind=gguf.GGMLQuantizationType.F32, pre="gpt-2"):
    """Write a model as llama.cpp's converter does; `values` and `tensors` are added, keys `without` left out."""
    config, name = model.config, model.config.model_type
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    tokenizer = json.loads(load_tokenizer(TOKENIZER).backend_tokenizer.to_str())["model"]
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_parameters["rope_theta"],
    }
    written = {f"{name}.{key}": value for key, value in keys.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(tokenizer["vocab"], key=tokenizer["vocab"].get),
        "tokenizer.ggml.token_type": [SPECIAL] + [1] * 2047,
        "tokenizer.ggml.merges": [" ".join(each) for each in tokenizer["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
    writer = gguf.GGUFWriter(path, name)
    for key, value in (written | dict(values)).items():
        if key not in without:
            add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
            add.get(type(value), writer.add_array)(key, value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, name.upper()), config.num_hidden_layers)
    found = {}
    for key, tensor in model.state_dict().items():
        word, _, suffix = key.rpartition(".")
        array, heads = tensor.numpy(), {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        if name == "llama" and word.endswith(("q_proj", "k_proj")):
            array = array.reshape(heads[word[-6]], 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if not (key == "lm_head.weight" and config.tie_word_embeddings):
            found[f"{names.get_name(word)}.{suffix}"] = array
    for key, array in (found | dict(tensors)).items():
        if key not in without:
            packed = kind if array.ndim == 2 and array.shape[1] % 32 == 0 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(key, gguf.quants.quantize(array, packed), raw_dtype=packed)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
