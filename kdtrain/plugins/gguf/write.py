"""A student as a GGUF, the one file that llama.cpp reads: configuration, tokenizer and weights.

The rules are those of llama.cpp's own converter (conversion/base.py, llama.py and qwen.py there): names by the package
gguf; of llama, and of no other shape, the rows of Q and K in another order, biases too, because llama.cpp turns pairs
of neighbours; the factors of llama3's rotation as a tensor. There is a head where its weights are not the embedding's,
whatever the configuration says. Rows that the model has beyond its tokenizer are `[PADn]`.

A file that is wrong in one of these loads all the same and answers a little worse. So what is not known here is
refused, and what is written is run in llama.cpp, where that is installed, before it is published (`check`).

What it gives up: other shapes and tokenizers, K-quants (llama-quantize makes them of this file), and NFC, by which
Qwen2's tokenizer normalises a text first, and which llama.cpp leaves out.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from kdtrain.commands.export import Exported
from kdtrain.errors import UsageError, printable
from kdtrain.imports import optional
from kdtrain.models.adapters import merged_state, refuse_overflow
from kdtrain.models.export import complete_generation
from kdtrain.models.loading import whole_model
from kdtrain.models.tokenizer import end_tokens, load_tokenizer
from kdtrain.monitor.progress import log
from kdtrain.plugins.gguf.check import write_checked

BIASES = {"llama": ("_proj.bias",), "qwen2": ("q_proj.bias", "k_proj.bias", "v_proj.bias"), "qwen3": ()}
"""The shapes that are written, each with the biases that llama.cpp reads of it."""
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTES],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTES],
    "qwen2": [
        {"type": "Split", "pattern": {"Regex": _QWEN2}, "behavior": "Isolated", "invert": False},
        _BYTES | {"use_regex": False},
    ],
}
"""What splits a text, by llama.cpp's name, as a tokenizer.json has it."""
_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FILES = {"F32": 0, "F16": 1, "BF16": 32, "Q8_0": 7}
"""The number of a file by the kind of its weights."""
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def export_gguf(of: Exported) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prepare the file and its card: the arguments of `export_model`, and what is shown, which writing completes.

    UsageError: the package gguf is missing, or --out, the student or its tokenizer is nothing for this format.
    """
    optional("gguf", "gguf", "--format gguf")
    config, name = of.config, of.config.out.resolve().name
    if name.endswith(".gguf"):
        raise UsageError(f"--out {config.out} becomes a folder, of the file and its card; name it without .gguf")
    model: Any = whole_model(of.student).eval()
    shape = model.config.model_type
    if shape not in BIASES:
        raise UsageError(f"--format gguf writes {', '.join(BIASES)}, and this student is {shape}; leave --format out")
    if of.tokenizer is None:
        raise UsageError(f"{of.run} holds no tokenizer, and a GGUF needs it; put its files into {of.run / 'tokenizer'}")
    tokenizer = load_tokenizer(of.tokenizer)
    if model.generation_config is not None:
        complete_generation(model, of.tokenizer)
    rest = _KINDS[config.torch_dtype]
    kind = rest if config.quantize is None else config.quantize.upper()
    entries = {"general.name": name, "general.quantization_version": 2}
    entries |= {"general.license": config.license} if config.license else {}
    entries |= {f"{shape}.{key}": value for key, value in _shape(model.config).items()}
    entries |= {f"tokenizer.{key}": value for key, value in _vocabulary(model, tokenizer).items()}
    state = merged_state(model)
    refuse_overflow(state, getattr(torch, config.torch_dtype))
    file = f"{name}.gguf"
    shown = {"next": f"llama-cli -m {shlex.quote(str(config.out / file))}"}

    def write(folder: Path) -> None:
        odd = set[str]()

        def write_as(each: str) -> None:
            odd.update(_write(folder / file, shape, entries, _tensors(model, state), each, rest))

        shown["checked"] = write_checked(folder / file, write_as, kind, model, tokenizer)
        if odd:
            log.info("%s stay in %s: their rows are no multiple of 32", ", ".join(sorted(odd)), rest)
        log.info("%s: %s", file, shown["checked"])
        loading = ("```bash", f"llama-cli -m {shlex.quote(f'path/to/{name}/{file}')}", "```")
        more = {"checked": shown["checked"]}
        for each, content in of.card(weights=kind, library="gguf", loading=loading, more=more).items():
            (folder / each).write_bytes(content)

    return {"tokenizer": None, "writer": write}, shown


def _shape(config: Any) -> dict[str, Any]:
    """The entries of a configuration. UsageError: llama.cpp cannot compute with it."""
    rope, heads = config.rope_parameters, config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = ("default", "llama3") if config.model_type == "llama" else ("default",)
    for wrong, what in (
        (config.hidden_act != "silu", f"hidden_act = {config.hidden_act}"),
        (rope["rope_type"] not in kinds, f"rope_type = {rope['rope_type']}"),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "a part of each head rotated"),
        ("sliding_attention" in (getattr(config, "layer_types", None) or ()), "sliding windows"),
    ):
        if wrong:
            known = f"silu, rope_type {' or '.join(kinds)}, whole heads and full attention"
            raise UsageError(f"--format gguf writes {config.model_type} with {known}, not with {what}")
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": size,
        "attention.value_length": size,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.dimension_count": size,
        "rope.freq_base": float(rope["rope_theta"]),
    }


def _vocabulary(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The entries of a tokenizer. UsageError: llama.cpp would split texts otherwise."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    bpe, splits = content["model"], content["pre_tokenizer"] or {}
    parts = [
        {key: each[key] for key in each if key != "trim_offsets"} for each in splits.get("pretokenizers", [splits])
    ]
    found = [name for name, known in PRE.items() if known == parts]
    plain = content["normalizer"] is None or (found == ["qwen2"] and content["normalizer"] == {"type": "NFC"})
    odd = [key for key in ("byte_fallback", "ignore_merges", "dropout", "end_of_word_suffix") if bpe.get(key)]
    if not found or not plain or odd or bpe["type"] != "BPE":
        raise UsageError(
            f"--format gguf writes byte-level BPE that splits texts as {', '.join(PRE)} do, and this one does not "
            f"({', '.join([bpe['type'], *odd, printable(json.dumps([content['normalizer'], *parts]))])[:300]})"
        )
    size, added = model.config.vocab_size, content["added_tokens"]
    if (last := max([*bpe["vocab"].values(), *(each["id"] for each in added)])) >= size:
        raise UsageError(
            f"the tokenizer has the id {last}, and the student {size} rows; --format gguf needs a row for each"
        )
    texts, types = [f"[PAD{number}]" for number in range(size)], [_UNUSED] * size
    for text, number in bpe["vocab"].items():
        texts[number], types[number] = text, _NORMAL
    for each in added:
        if each["lstrip"] or each["rstrip"] or each["single_word"]:
            raise UsageError(
                f"the token {printable(each['content'])} takes the text beside it, which a GGUF cannot state"
            )
        texts[each["id"]], types[each["id"]] = each["content"], _CONTROL if each["special"] else _USER_DEFINED
    merges = [each if isinstance(each, str) else " ".join(each) for each in bpe["merges"]]
    entries = {"ggml.model": "gpt2", "ggml.pre": found[0], "ggml.tokens": texts, "ggml.token_type": types}
    settings = model.generation_config
    first, bos = tokenizer.eos_token_id, tokenizer.bos_token_id
    ends = sorted(end_tokens(settings, tokenizer), key=lambda each: each != first)
    special = dict(zip(("eos", "eot", "eom"), ends, strict=False)) | {"bos": bos}
    special["padding"] = getattr(settings, "pad_token_id", None)
    entries |= {f"ggml.{name}_token_id": each for name, each in special.items() if each is not None}
    if (begins := tokenizer("").input_ids) not in ([], [bos]):
        raise UsageError(
            f"the tokenizer adds the ids {begins} to a text, and --format gguf writes only a bos before it"
        )
    if tokenizer.chat_template:
        entries["chat_template"] = tokenizer.chat_template
    return entries | {"ggml.merges": merges, "ggml.add_bos_token": bool(begins), "ggml.add_space_prefix": False}


def _tensors(model: Any, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors by llama.cpp's names, in its order of rows. UsageError: llama.cpp has no place for one."""
    import gguf

    config, shape = model.config, model.config.model_type
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[shape.upper()], config.num_hidden_layers)
    for name, tensor in state.items():
        if name == "lm_head.weight" and torch.equal(tensor, state["model.embed_tokens.weight"]):
            continue
        found = names.get_name(name, (".weight", ".bias"))
        if found is None or (name.endswith(".bias") and not name.endswith(BIASES[shape])):
            raise UsageError(f"--format gguf: llama.cpp's {shape} has no place for {name} of this student")
        layer = name.rpartition(".")[0]
        if shape == "llama" and layer.endswith(("q_proj", "k_proj")):
            heads = config.num_attention_heads if layer.endswith("q_proj") else config.num_key_value_heads
            tensor = rearrange(tensor, "(head half turn) ... -> (head turn half) ...", head=heads, half=2)
        yield found, tensor
    if config.rope_parameters["rope_type"] == "llama3":
        slowed = model.model.rotary_emb.inv_freq.double()
        plain = float(config.rope_parameters["rope_theta"]) ** -(torch.arange(len(slowed)).double() / len(slowed))
        yield "rope_freqs.weight", plain / slowed


def _write(
    path: Path, shape: str, entries: Mapping[str, Any], tensors: Iterator[tuple[str, Tensor]], kind: str, rest: str
) -> list[str]:
    """Write the file, and return the names, `*` for a layer, of tensors that cannot be of `kind` and are of `rest`."""
    import gguf

    writer, odd = gguf.GGUFWriter(path, shape), list[str]()
    for key, value in {**entries, "general.file_type": _FILES[kind]}.items():
        add = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
        getattr(writer, f"add_{add}")(key, value)
    for name, tensor in tensors:
        fits = kind != "Q8_0" or tensor.shape[-1] % 32 == 0
        odd += [] if fits or tensor.ndim == 1 else [re.sub(r"\d+", "*", name)]
        form = kind if fits else rest
        form = gguf.GGMLQuantizationType["F32" if tensor.ndim == 1 else form]
        writer.add_tensor(name, gguf.quantize(tensor.detach().float().contiguous().numpy(), form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return odd
