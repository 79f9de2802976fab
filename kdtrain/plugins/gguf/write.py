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
import shlex
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from kdtrain.errors import UsageError, log, printable
from kdtrain.imports import optional
from kdtrain.models.tokenizer import end_tokens, load_tokenizer
from kdtrain.plugins.gguf.check import write_checked
from kdtrain.plugins.gguf.header import CONTROL, NORMAL, UNUSED, USER_DEFINED
from kdtrain.plugins.gguf.pretokenizers import PRE_TOKENIZERS

BIASES = {"llama": ("_proj.bias",), "qwen2": ("q_proj.bias", "k_proj.bias", "v_proj.bias"), "qwen3": ()}
"""The shapes that are written, each with the biases that llama.cpp reads of it."""


def export_gguf(of: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Prepare the file and its card; return the arguments of `export_model`, and the result, which writing completes.

    of: `kdtrain.commands.export.Exported`.

    UsageError: the package gguf is missing, or --out, the student or its tokenizer is nothing for this format.
    """
    optional("gguf", "gguf", "--format gguf")
    config, name = of.config, of.config.out.resolve().name
    if name.endswith(".gguf"):
        raise UsageError(f"--out {config.out} becomes the folder of the file; name it without .gguf")
    model = of.model()
    shape = model.config.model_type
    if shape not in BIASES:
        raise UsageError(f"--format gguf writes {', '.join(BIASES)}, and this student is {shape}")
    if of.tokenizer is None:
        raise UsageError(f"{of.run} holds no tokenizer, which a GGUF needs; put its files into {of.run / 'tokenizer'}")
    tokenizer = load_tokenizer(of.tokenizer)
    rest = config.torch_dtype.replace("float", "f").upper()
    kind = (config.quantize or rest).upper()
    entries = {"general.name": name, "general.license": config.license}
    entries |= _shape(model.config) | _vocabulary(model, tokenizer)
    state = of.weights()
    file = f"{name}.gguf"
    shown = {"next": f"llama-cli -m {shlex.quote(str(config.out / file))}"}

    def write(folder: Path) -> None:
        write_as = partial(_write, folder / file, model, state, entries, rest)
        checked = shown["checked"] = write_checked(folder / file, write_as, kind, model, tokenizer)
        log.info("%s: %s", file, checked)
        loading = ("```bash", f"llama-cli -m {shlex.quote(f'path/to/{name}/{file}')}", "```")
        card = of.card(weights=kind, loading=loading, more={"checked": checked})
        for each, content in card.items():
            (folder / each).write_bytes(content)

    return {"tokenizer": None, "writer": write}, shown


def _shape(config: Any) -> dict[str, Any]:
    """Return the entries of a configuration. UsageError: llama.cpp cannot compute with it."""
    rope, heads = config.rope_parameters, config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = ("default", "llama3") if config.model_type == "llama" else ("default",)
    windows = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    for what, value, known in (
        ("hidden_act", config.hidden_act, ("silu",)),
        ("rope_type", rope["rope_type"], kinds),
        ("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), (1.0,)),
        ("sliding windows", windows, (False,)),
    ):
        if value not in known:
            right = " or ".join(map(str, known))
            raise UsageError(f"--format gguf writes {config.model_type} with {what} = {right}, and not {value}")
    entries = {
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
    return {f"{config.model_type}.{key}": value for key, value in entries.items()}


def _vocabulary(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the entries of a tokenizer. UsageError: llama.cpp would split texts otherwise."""
    spelled = tokenizer.backend_tokenizer.to_str()
    content = json.loads(spelled.replace('"trim_offsets":false', '"trim_offsets":true'))  # which change no id
    bpe, normalizer = content["model"], content["normalizer"]
    rule = content["pre_tokenizer"], bpe.get("ignore_merges") or False
    pre = [
        name
        for name, each in PRE_TOKENIZERS.items()
        if rule == (each.pre_tokenizer, each.ignore_merges) and normalizer in (None, each.normalizer)
    ]
    if not pre or bpe["type"] != "BPE":
        known = ", ".join(PRE_TOKENIZERS)
        found = printable(json.dumps([bpe["type"], normalizer, *rule]))
        raise UsageError(f"--format gguf writes BPE that splits texts as {known}; this tokenizer is {found[:400]}")
    size = model.config.vocab_size
    pieces = {number: (text, NORMAL) for text, number in bpe["vocab"].items()}
    for each in content["added_tokens"]:
        if each["lstrip"] or each["rstrip"] or each["single_word"]:
            raise UsageError(f"--format gguf: the token {printable(each['content'])} looks at the text beside it")
        pieces[each["id"]] = each["content"], CONTROL if each["special"] else USER_DEFINED
    if (last := max(pieces)) >= size:
        raise UsageError(f"--format gguf: the tokenizer has the id {last}, and the student {size} rows")
    texts, types = zip(*(pieces.get(id, (f"[PAD{id}]", UNUSED)) for id in range(size)), strict=True)
    settings = model.generation_config
    first = tokenizer.eos_token_id
    bos = tokenizer.bos_token_id
    if (begins := tokenizer("").input_ids) not in ([], [bos]):
        raise UsageError(f"--format gguf: the tokenizer adds {begins} to a text, and not a bos alone")
    templates = tokenizer.chat_template
    templates = {**templates} if isinstance(templates, dict) else {"default": templates}
    ends = sorted(end_tokens(settings, tokenizer), key=lambda each: each != first)
    special = {"bos": bos, "padding": getattr(settings, "pad_token_id", None)}
    special |= dict(zip(("eos", "eot", "eom"), ends, strict=False))
    entries = {
        "ggml.model": "gpt2",
        "ggml.pre": pre[0],
        "ggml.tokens": list(texts),
        "ggml.token_type": list(types),
        "ggml.merges": [each if isinstance(each, str) else " ".join(each) for each in bpe["merges"]],
        "ggml.add_bos_token": bool(begins),
        **{f"ggml.{name}_token_id": each for name, each in special.items()},
        "chat_template": templates.pop("default", None),
        "chat_templates": sorted(templates) or None,
        **{f"chat_template.{name}": text for name, text in templates.items()},
    }
    return {f"tokenizer.{key}": value for key, value in entries.items()}


def _tensors(model: Any, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by llama.cpp's names, in its order of rows. UsageError: llama.cpp has no place for one."""
    import gguf

    config, shape = model.config, model.config.model_type
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[shape.upper()], config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in state.items():
        if name == "lm_head.weight" and torch.equal(tensor, state["model.embed_tokens.weight"]):
            continue
        found = names.get_name(name, (".weight", ".bias"))
        if found is None or (name.endswith(".bias") and not name.endswith(BIASES[shape])):
            raise UsageError(f"--format gguf: llama.cpp's {shape} has no place for {name} of this student")
        if shape == "llama" and (layer := name.split(".")[-2]) in heads:
            tensor = rearrange(tensor, "(head half turn) ... -> (head turn half) ...", head=heads[layer], half=2)
        yield found, tensor
    if config.rope_parameters["rope_type"] == "llama3":
        slowed = model.model.rotary_emb.inv_freq.double()
        plain = float(config.rope_parameters["rope_theta"]) ** -(torch.arange(len(slowed)).double() / len(slowed))
        yield "rope_freqs.weight", plain / slowed


def _write(
    path: Path, model: Any, state: Mapping[str, Tensor], entries: Mapping[str, Any], rest: str, kind: str
) -> None:
    """Write a file of `kind`; vectors are of F32, and what cannot be of `kind` is of `rest`."""
    import gguf

    writer = gguf.GGUFWriter(path, model.config.model_type)
    odd = list[str]()
    number = gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"]
    settings = {"general.file_type": int(number), "general.quantization_version": 2}
    for key, value in {**settings, **entries}.items():
        if value is not None:
            add = {bool: "bool", int: "uint32", float: "float32", str: "string", list: "array"}[type(value)]
            getattr(writer, f"add_{add}")(key, value)
    for name, tensor in _tensors(model, state):
        form = "F32" if tensor.ndim == 1 else kind
        if form == "Q8_0" and tensor.shape[-1] % 32:
            odd.append(name)
            form = rest
        array = tensor.detach().float().contiguous().numpy()
        raw = gguf.GGMLQuantizationType[form]
        writer.add_tensor(name, gguf.quantize(array, raw), raw_dtype=raw)
    if odd:
        log.info("%d tensors stay in %s, as %s: their rows are not multiples of 32", len(odd), rest, odd[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
