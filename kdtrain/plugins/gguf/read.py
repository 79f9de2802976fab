"""A GGUF file as a model folder: its configuration and tokenizer from the header, its weights by transformers.

transformers maps the keys and tensors that it knows, and leaves out the others in silence (attention biases, the
frequencies of Llama 3's rope, the head_dim of a Qwen3, most pre-tokenizers). So the configuration and the tokenizer are
made here, from keys of which each is known or refused, and the tensors must be those of that configuration, in its
shapes; transformers then only reads and dequantises them. What it gives up: architectures other than `ARCHITECTURES`,
longer contexts by rope scaling, and tokenizers other than byte-level BPE with a name of `PRE_TOKENIZERS`.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr
from functools import cached_property, lru_cache
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig

from kdtrain.errors import UsageError
from kdtrain.files import file_digest, refuse_leading_out
from kdtrain.imports import optional
from kdtrain.plugins.gguf.header import CONTROL, UNUSED, USER_DEFINED, Header, read_header
from kdtrain.plugins.gguf.pretokenizers import PRE_TOKENIZERS

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_REQUIRED = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_READ = {
    *("attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon", "attention.value_length"),
    *("rope.dimension_count", "rope.freq_base", "vocab_size"),
}
_TEMPLATE = "tokenizer.chat_template"
_NEUTRAL = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "rope.scaling.type": "none"}
"""Keys that change nothing with this value."""
_NEUTRAL_OF_TOKENIZERS = {"add_sep_token", "add_space_prefix", "remove_extra_whitespaces"}
"""Which change nothing where they are false."""
_OF_TOKENIZERS = {
    *("model", "pre", "tokens", "token_type", "merges", "add_bos_token", "add_eos_token", "scores"),
    *(f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "padding", "unknown")),
    *(f"{name}_token_id" for name in ("cls", "mask", "seperator", "prefix", "suffix", "middle")),
    *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid", "pad", "rep", "sep")),
    *(_TEMPLATE, f"{_TEMPLATE}s", "tokenizer.huggingface.json"),
}
"""Keys, of `tokenizer.ggml.` but for the last line's, that are read or that llama.cpp does not use for a BPE's ids."""


@lru_cache(maxsize=4)
def _opened(path: str, size: int, changed: int) -> "GGUFFile":
    return GGUFFile(Path(path))


def open_file(path: str) -> "GGUFFile":
    """Open a file; while it does not change it is read once. UsageError: it cannot be read, or not rightly."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    return _opened(path, found.st_size, found.st_mtime_ns)


class GGUFFile:
    """A file whose header is known and agrees with itself; see `kdtrain.models.hub.ModelFile`."""

    def __init__(self, path: Path) -> None:
        refuse_leading_out(path, (path.parent, path.parent.resolve() / ".." / ".." / "blobs"))  # the hub's own cache
        self.path = path
        self._header = read_header(path)
        try:
            parts = {"config": configuration(self._header), **tokenizer_parts(self._header)}
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from None
        self._generation = parts["generation_config"]
        self._made = tempfile.TemporaryDirectory(prefix="kdtrain-gguf-")
        self.folder = Path(self._made.name)
        for name, table in parts.items():
            (self.folder / f"{name}.json").write_text(json.dumps(table, ensure_ascii=False), encoding="utf-8")

    @cached_property
    def facts(self) -> dict[str, str]:
        """Return the SHA-256 of the file, and how many tensors it has of each type."""
        types = ", ".join(f"{count} {kind}" for kind, count in self._header.types.most_common())
        return {"file_digest": file_digest(self.path), "quantised": f"GGUF, {types}"}

    def load(self, config: PreTrainedConfig, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Load the model, dequantised, as if it had never been quantised; return it with transformers' account."""
        optional("accelerate", "gguf", str(self.path))
        auto: Any = AutoModelForCausalLM
        # An absolute path: transformers looks for a name in the current folder first.
        with redirect_stderr(StringIO()):  # a bar that no setting of transformers turns off
            model, found = auto.from_pretrained(
                self.folder,
                config=config,
                gguf_file=str(self.path.resolve()),
                trust_remote_code=False,
                output_loading_info=True,
                **options,
            )
        for each in ("quantization_config", "_pre_quantization_dtype"):  # with which save_pretrained and to(dtype) fail
            vars(model.config).pop(each, None)
        for each in ("hf_quantizer", "is_quantized", "quantization_method"):
            vars(model).pop(each, None)
        model.generation_config = GenerationConfig(**self._generation)
        return model, found


def configuration(header: Header) -> dict[str, Any]:
    """Return the configuration of transformers (config.json). ValueError: what of the file it would leave out."""
    values = header.values
    kind = _text(header, "general.architecture")
    if kind not in ARCHITECTURES:
        raise ValueError(f"its architecture is {kind[:80]!r}; {', '.join(ARCHITECTURES)} are read")
    if values.get("general.type", "model") != "model" or "split.count" in values:
        raise ValueError("it is an adapter, or a part of a model; give the file of a whole model")
    for key, value in values.items():
        name = key.removeprefix(f"{kind}.")
        known = name in _REQUIRED or name in _READ or (name in _NEUTRAL and value == _NEUTRAL[name])
        if name != key and not known:
            raise ValueError(f"{key[:80]} = {str(value)[:40]} changes the model, and transformers does not read it")
    found: dict[str, Any] = {ours: _number(header, f"{kind}.{key}") for key, ours in _REQUIRED.items()}
    heads = found["num_attention_heads"]
    size = _number(header, f"{kind}.attention.key_length", found["hidden_size"] // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (given := _number(header, f"{kind}.{key}", size)) != size:
            raise ValueError(f"{kind}.{key} = {given}, and transformers reads no other than the head's {size}")
    biased = kind == "qwen2" or "blk.0.attn_q.bias" in header.shapes
    found |= {
        "model_type": kind,
        "architectures": [ARCHITECTURES[kind]],
        "head_dim": size,
        "num_key_value_heads": _number(header, f"{kind}.attention.head_count_kv", heads),
        "rms_norm_eps": _real(header, f"{kind}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": _real(header, f"{kind}.rope.freq_base", 10000.0)},
        "tie_word_embeddings": "output.weight" not in header.shapes,
        "vocab_size": header.shapes.get("token_embd.weight", (0,))[0],
        **({} if kind == "qwen2" else {"attention_bias": biased}),
        **({"mlp_bias": "blk.0.ffn_up.bias" in header.shapes} if kind == "llama" else {}),
        **{f"{name}_token_id": _id(header, name) for name in ("bos", "eos")},
    }
    if found["num_hidden_layers"] > len(header.shapes):
        raise ValueError(f"it has {len(header.shapes)} tensors for {found['num_hidden_layers']:,} layers")
    wanted = dict(_tensors(found, biased))
    for name in sorted(header.shapes.keys() - wanted.keys()):
        raise ValueError(f"its tensor {name[:80]} changes the model, and transformers does not read it")
    for name, shape in wanted.items():
        if header.shapes.get(name) != shape:
            there = list(header.shapes.get(name, ())) or "missing"
            raise ValueError(f"its tensor {name} is {there}, and its keys need {list(shape)}")
    if (given := _number(header, f"{kind}.vocab_size", found["vocab_size"])) != found["vocab_size"]:
        raise ValueError(f"{kind}.vocab_size = {given}, and its embedding has {found['vocab_size']} rows")
    return found


def _tensors(config: dict[str, Any], biased: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors of a configuration."""
    width, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * size, config["num_key_value_heads"] * size
    yield "token_embd.weight", (config["vocab_size"], width)
    yield "output_norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "output.weight", (config["vocab_size"], width)
    linear = {"attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (keys, width)}
    linear |= {"attn_output": (width, queries)}
    linear |= {"ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}
    bias = ["attn_q", "attn_k", "attn_v"] if biased else []
    if biased and "attention_bias" in config:
        bias.append("attn_output")
    bias += [name for name in linear if name.startswith("ffn") and config.get("mlp_bias")]
    norms = {"attn_norm": width, "ffn_norm": width}
    norms |= {"attn_q_norm": size, "attn_k_norm": size} if config["model_type"] == "qwen3" else {}
    for layer in range(config["num_hidden_layers"]):
        yield from ((f"blk.{layer}.{name}.weight", shape) for name, shape in linear.items())
        yield from ((f"blk.{layer}.{name}.weight", (length,)) for name, length in norms.items())
        yield from ((f"blk.{layer}.{name}.bias", linear[name][:1]) for name in bias)


def tokenizer_parts(header: Header) -> dict[str, Any]:
    """Return the tables of tokenizer.json, tokenizer_config.json and generation_config.json, by name.

    ValueError: the tokenizer is of another kind than is read, or does not agree with itself.
    """
    kind, pre = _text(header, "tokenizer.ggml.model"), _text(header, "tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ValueError(f"its tokenizer is {kind[:40]!r}; 'gpt2', byte-level BPE, is read")
    if pre not in PRE_TOKENIZERS:
        raise ValueError(f"its pre-tokenizer is {pre[:40]!r}; {', '.join(PRE_TOKENIZERS)} are read")
    for key, value in header.values.items():
        name = key.removeprefix("tokenizer.ggml.")
        fine = name in _OF_TOKENIZERS or (name in _NEUTRAL_OF_TOKENIZERS and value is False)
        if key.startswith("tokenizer.") and not (fine or key.startswith(f"{_TEMPLATE}.")):
            raise ValueError(f"{key[:80]} = {str(value)[:40]} may change the tokens of a text, and is not read")
    rule = PRE_TOKENIZERS[pre]
    tokens = _list(header, "tokenizer.ggml.tokens", str)
    merges = [each.split(" ") for each in _list(header, "tokenizer.ggml.merges", str)]
    types = _list(header, "tokenizer.ggml.token_type", int, [1] * len(tokens))
    rows = header.shapes["token_embd.weight"][0]
    if len({*tokens}) < len(tokens) or len(types) != len(tokens) or len(tokens) > rows:
        raise ValueError(
            f"its {len(tokens):,} tokens are not as many types, different from each other, and {rows:,} rows"
        )
    while tokens and types[-1] == UNUSED and re.fullmatch(r"\[PAD\d+\]", tokens[-1]):  # of rows without a token
        tokens, types = tokens[:-1], types[:-1]
    extra = [number for number, each in enumerate(types) if each in (CONTROL, USER_DEFINED)]
    # Special tokens behind all others are no part of the BPE itself, as tokenizers are written.
    end = max((number + 1 for number in range(len(tokens)) if types[number] not in (CONTROL, USER_DEFINED)), default=0)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [{"id": each, "content": tokens[each], **flags, "special": types[each] == CONTROL} for each in extra]
    vocabulary = {token: number for number, token in enumerate(tokens[:end])}
    if any(len(each) != 2 or not {*each, "".join(each)} <= vocabulary.keys() for each in merges):
        raise ValueError("a merge of its tokenizer is not of two tokens into one")
    unset = dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"))
    bpe = {"type": "BPE", **unset, "fuse_unk": False, "byte_fallback": False, "ignore_merges": rule.ignore_merges}
    special = {name: _id(header, name, most=len(tokens)) for name in ("bos", "eos", "eot", "eom", "pad", "unk")}
    config: dict[str, Any] = {f"{name}_token": tokens[at] for name, at in special.items() if at is not None}
    config = {key: token for key, token in config.items() if key not in ("eot_token", "eom_token")}
    config |= {"tokenizer_class": "TokenizersBackend", "clean_up_tokenization_spaces": False}
    keys = [key for key in header.values if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}.")]
    templates = {key.removeprefix(f"{_TEMPLATE}.").replace(_TEMPLATE, "default"): _text(header, key) for key in keys}
    named = [{"name": name, "template": text} for name, text in templates.items()]
    config["chat_template"] = templates.get("default") if templates.keys() <= {"default"} else named
    known = {number for name in ("eos", "eot", "eom") if (number := special[name]) is not None}
    ends = sorted(known) if len(known) > 1 else special["eos"]
    generation = {"bos_token_id": special["bos"], "pad_token_id": special["pad"], "eos_token_id": ends}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": rule.normalizer,
        "pre_tokenizer": rule.pre_tokenizer,
        "post_processor": _around(header, tokens, special, rule.add_bos and special["bos"] is not None),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {**bpe, "vocab": vocabulary, "merges": merges},
    }
    return {"tokenizer": tokenizer, "tokenizer_config": config, "generation_config": generation}


def _around(header: Header, tokens: list[str], special: dict[str, int | None], add_bos: bool) -> dict[str, Any]:
    """Return the post-processor: the tokens that the file, or else its pre-tokenizer, wants around a text."""
    default = {"bos": add_bos, "eos": False}
    wanted = [name for name in default if _value(header, f"tokenizer.ggml.add_{name}_token", bool, default[name])]
    if missing := [name for name in wanted if special[name] is None]:
        raise ValueError(f"tokenizer.ggml.add_{missing[0]}_token is true, and there is no such token")
    known = {name: (number, tokens[number]) for name in wanted if (number := special[name]) is not None}
    parts = {name: {"SpecialToken": {"id": token, "type_id": 0}} for name, (_, token) in known.items()}
    one = [{"Sequence": {"id": "A", "type_id": 0}}]
    before, behind = ([parts[name]] if name in parts else [] for name in ("bos", "eos"))
    ids = {token: {"id": token, "ids": [number], "tokens": [token]} for number, token in known.values()}
    pair = [*before, *one, *behind, *before, {"Sequence": {"id": "B", "type_id": 1}}, *behind]
    return {"type": "TemplateProcessing", "single": [*before, *one, *behind], "pair": pair, "special_tokens": ids}


_MISSING: Any = object()


def _value(header: Header, key: str, kind: type, default: Any) -> Any:
    found = header.values.get(key, default)
    if found is _MISSING:
        raise ValueError(f"it has no {key}")
    if found is not default and type(found) is not kind:
        raise ValueError(f"{key} = {str(found)[:40]} is not {'a list' if kind is list else f'of type {kind.__name__}'}")
    return found


def _text(header: Header, key: str) -> str:
    return str(_value(header, key, str, _MISSING))


def _number(header: Header, key: str, default: Any = _MISSING) -> int:
    found = _value(header, key, int, default)
    if not 1 <= found < 2**31:
        raise ValueError(f"{key} = {found} is not at least 1 and less than 2^31")
    return int(found)


def _real(header: Header, key: str, default: Any = _MISSING) -> float:
    """Return a number stored in float32, as the shortest decimal: 1e-05, not 9.999999747378752e-06."""
    found = float(str(np.float32(_value(header, key, float, default))))
    if not 0 < found < float("inf"):
        raise ValueError(f"{key} = {found} is not a finite number above 0")
    return found


def _list(header: Header, key: str, kind: type, default: Any = _MISSING) -> list[Any]:
    found = _value(header, key, list, default)
    if any(type(each) is not kind for each in found):
        raise ValueError(f"{key} has an entry that is not of type {kind.__name__}")
    return list(found)


def _id(header: Header, name: str, most: int = 2**31) -> int | None:
    word = {"pad": "padding", "unk": "unknown"}.get(name, name)
    found = _value(header, f"tokenizer.ggml.{word}_token_id", int, None)
    if found is not None and not 0 <= found < most:
        raise ValueError(f"tokenizer.ggml.{word}_token_id = {found} is not a token")
    return found
