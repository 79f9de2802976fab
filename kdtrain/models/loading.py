"""Load a model or a tokenizer from a spec, export a model to a folder, and compute a digest that identifies a model.

Models come from `transformers.AutoModelForCausalLM`, from safetensors only: nothing is unpickled, and code that comes
with a model runs only if its spec allows it. Teachers keep the dtype of their spec and are frozen; students get float32
weights whatever was stored, because the optimizer's steps are smaller than the resolution of bfloat16. If a checkpoint
lacks weights, transformers draws them at random, with a warning; here that is an error.
"""

import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import GENERATION_CONFIG_NAME

from kdtrain.errors import RunError, UsageError, making, writing
from kdtrain.files import (
    LARGE,
    Lock,
    canonical_json,
    file_digest,
    files_below,
    hidden_folder,
    hidden_lock,
    make_folder,
    publish_json,
    read_bytes,
    read_sealed,
    read_text,
    refuse_displacing,
    refuse_mount,
    remove_empty,
    remove_folder,
    swap_in,
    sweep,
    typed,
)
from kdtrain.models.adapters import adapted, merged_state, refuse_overflow, write_adapter
from kdtrain.models.ends import end_tokens
from kdtrain.models.head import SplitModel, state_ties
from kdtrain.models.hub import (
    TOKENIZER_FILES,
    ask,
    ask_config,
    ask_generation,
    ask_tokenizer,
    attention_option,
    config_of,
    one_line,
    refuse_foreign_weights,
    refuse_impossible,
    refuse_large_generation,
    revision_of,
    save_tokenizer,
)
from kdtrain.models.int8 import quantize_folder
from kdtrain.models.router import experts_of
from kdtrain.models.scratch import configuration, model_from_config, model_from_layers, new_model
from kdtrain.models.spec import LOCAL, ModelSpec, read_spec

ORIGIN = "kdtrain.json"
"""A sealed file in an exported model: its origin, and the SHA-256 of its files."""
_SPECIAL = ("bos", "eos", "pad")


def load_tokenizer(source: ModelSpec | str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a spec, a folder or a hub id. Raises `UsageError` if there is none."""
    if not isinstance(source, ModelSpec):
        return ask_tokenizer(str(source), trust_remote_code=False)
    if source.tokenizer is not None:
        return ask_tokenizer(source.tokenizer, trust_remote_code=source.trust_remote_code)
    if source.teacher is not None:
        return load_tokenizer(read_spec(source.teacher, "teachers"))
    if source.source is None:
        raise UsageError(f"{source.name}: this spec names no tokenizer; add tokenizer = a folder or hub id")
    return ask_tokenizer(source.source, revision=revision_of(source), trust_remote_code=source.trust_remote_code)


def generation_of(source: ModelSpec | str | Path) -> GenerationConfig | None:
    """Load the generation settings that came with a tokenizer (as `load_tokenizer` finds it): a chat model's end tokens
    and sampling.

    None where its author wrote none. Raises `UsageError` if they cannot be read.
    """
    if not isinstance(source, ModelSpec):
        found = ask_generation(str(source))
    elif source.tokenizer is None and source.teacher is not None:
        return generation_of(read_spec(source.teacher, "teachers"))
    elif (place := source.tokenizer or source.source) is None:
        return None
    else:
        found = ask_generation(place, "main" if source.tokenizer else revision_of(source))
    return None if found is None else generation_from("generation_config.json", found)


def ends_of(spec: ModelSpec, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end a teacher's texts, ascending: by its tokenizer, and by what came with that and with its weights.

    Raises `UsageError` if they cannot be read.
    """
    sources = [spec, replace(spec, tokenizer=None)] if spec.tokenizer and spec.source else [spec]
    return tuple(sorted({each for source in sources for each in end_tokens(generation_of(source), tokenizer)}))


class ChatTokenizer:
    """A tokenizer that saves the generation settings that came with it beside its own files."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, generation: GenerationConfig | None) -> None:
        self.tokenizer, self.generation = tokenizer, generation

    def save_pretrained(self, folder: Path) -> None:
        """Write the files into an existing folder, and nowhere else."""
        save_tokenizer(self.tokenizer, folder)
        if self.generation is not None:
            self.generation.save_pretrained(folder)


def load_teacher(spec: ModelSpec, device: str, seed: int = 0) -> PreTrainedModel:
    """Load a teacher: in evaluation mode, without gradients, in the dtype of its spec.

    seed: of the weights, for a spec that starts from scratch. Raises `UsageError` for a spec that cannot be loaded, and
    for non-finite weights, which would otherwise look like a fault of the student or the data.
    """
    if spec.lora is not None:
        raise UsageError(f"teacher {spec.name}: [lora] is for a student, and a teacher is not trained; take it out")
    model: Any = _build(spec, getattr(torch, spec.dtype), None, seed)
    model = model.to(device).eval().requires_grad_(False)
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            raise UsageError(
                f"teacher {spec.name}: {name} is non-finite in {spec.dtype}; fetch or export the teacher again, "
                "or set another dtype in its spec"
            )
    return cast(PreTrainedModel, model)


def vocabulary(spec: ModelSpec) -> int:
    """Rows of the output head by a spec's configuration, without loading a weight."""
    return int(configuration(spec, None).get_text_config().vocab_size)


def is_model_folder(path: Path) -> bool:
    """Whether a folder is not a run, and holds a model as transformers saves it."""
    return (path / "config.json").is_file() and not (path / "config.toml").exists()


def with_weights_of(folder: Path, spec: ModelSpec) -> ModelSpec:
    """`spec`, but with the model in `folder`, which agrees with all that the configuration of `spec` states.

    Raises `UsageError` where it does not.
    """
    if spec.init == "teacher-layers":
        raise UsageError(f"--load {folder} has all weights, and {spec.name} copies layers; give --student {folder}")
    found = replace(
        spec, source=os.path.normpath(folder), config=None, init="pretrained", revision=None, trust_remote_code=False
    )
    theirs = ask_config(found)
    own = configuration(spec, theirs.vocab_size)
    stated = plain_config(own) if spec.config is None else spec.config
    for key in stated:
        ours, loaded = getattr(own, key, None), getattr(theirs, key, None)
        untied = key == "tie_word_embeddings" and loaded is False and spec.config is None  # as by `state_ties`
        if ours != loaded and not (untied or key.endswith(("_token_id", "architectures", "_eps", "_epsilon"))):
            raise UsageError(f"--load {folder} has {key} = {loaded}, and {spec.name} {ours}; give --student {folder}")
    return found


def load_student(spec: ModelSpec, *, vocab_size: int | None, seed: int, device: str) -> PreTrainedModel:
    """Load or make a student, in float32 and in training mode.

    vocab_size: the smallest vocabulary that the student may have; also the size of a `[config]` without one. seed: of
    fresh weights; the global random state does not change. Raises `UsageError` for a spec that cannot be loaded, or a
    smaller vocabulary.
    """
    model: Any = _build(spec, torch.float32, vocab_size, seed)
    held = model.config.get_text_config().vocab_size
    if vocab_size is not None and held < vocab_size:
        raise UsageError(
            f"student {spec.name} has {held:,} tokens and needs {vocab_size:,}; take one of that vocabulary"
        )
    if model.generation_config is not None:
        model.generation_config = savable_generation(model.generation_config)
    # An embedding's padding row gets no gradient. Packed rows are not padded, and many models pad with eos.
    model.get_input_embeddings().padding_idx = None
    return model.to(device).train()


def savable_generation(given: GenerationConfig) -> GenerationConfig:
    """`given`, or its special tokens alone if transformers loads it but refuses to write it."""
    try:
        given.validate(strict=True)
    except (ValueError, TypeError):
        return GenerationConfig(**{f"{each}_token_id": getattr(given, f"{each}_token_id") for each in _SPECIAL})
    return given


def generation_from(name: str, table: Mapping[str, Any]) -> GenerationConfig:
    """The generation settings of a table of an unknown author. Raises `UsageError` that begins with `name`."""
    # GenerationConfig takes any name, even that of one of its methods
    known = GenerationConfig().to_dict().keys()
    kept = {key: value for key, value in table.items() if key in known}
    refuse_impossible(name, kept)
    return savable_generation(ask(name, lambda: GenerationConfig(**kept)))


def architecture(model: nn.Module) -> dict[str, Any]:
    """The configuration of a model, which decides its shape and its forward, as plain JSON values."""
    return plain_config(_whole(model).config)


def plain_config(config: PreTrainedConfig) -> dict[str, Any]:
    """A configuration as plain JSON values, without what does not decide the forward: see `architecture`."""
    kept = json.loads(config.to_json_string())
    return {key: value for key, value in kept.items() if key not in ("transformers_version", "dtype", "_name_or_path")}


def generation_settings(model: nn.Module) -> dict[str, Any]:
    """A model's settings for sampling and the tokens that end its texts, as plain JSON values."""
    given = _whole(model).generation_config
    return {} if given is None else json.loads(given.to_json_string())


def model_of(
    name: str, kept: dict[str, Any], attention: str, generation: dict[str, Any] | None = None
) -> PreTrainedModel:
    """A float32 model of an `architecture`, with its `generation_settings`; the caller loads its weights.

    Safe for tables of an unknown author: no code runs. Raises `UsageError` that begins with `name`.
    """
    table = {key: PreTrainedConfig._decode_special_floats(value) for key, value in kept.items()}  # of to_json_string
    config = config_of(name, table.pop("model_type", None), table)
    model = new_model(name, config, attention, trust_remote_code=False)
    if generation is not None and model.generation_config is not None:
        model.generation_config = generation_from(name, generation)
    return model


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make the layers of a model store only their inputs in training and recompute the rest in the backward.

    Values and gradients stay the same to the last bit, dropout included (arXiv 1604.06174).

    Raises:
        UsageError: the model does not support it.
    """
    if not model.supports_gradient_checkpointing:
        raise UsageError(f"{type(model).__name__} cannot recompute its layers; leave --activation-checkpointing out")
    # The reentrant kind needs inputs with gradients, and does not compile with embeddings of tokens.
    how = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(how)
    else:
        model.gradient_checkpointing_enable(how)


def model_digest(model: nn.Module, *dtypes: torch.dtype) -> str:
    """Return the SHA-256 of the state dict: names in order, dtypes, shapes and bytes, cast to each of `dtypes`."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        for dtype in dtypes if tensor.is_floating_point() else ():
            tensor = tensor.to(dtype)
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over the parts of a tokenizer that decide the ids.

    These are the model (vocabulary, merges), the normalizer, the pre-tokenizer and the added tokens with their ids;
    padding and truncation, which loading and use change, are left out.

    tokenizer: a folder with tokenizer.json, or a loaded fast tokenizer. UsageError: the folder has no tokenizer.json.
    """
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer) / "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"{path} is missing; the folder must hold a fast tokenizer")
        try:
            text = read_text(path, LARGE)
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} cannot be read: {error}") from error
    else:
        text = tokenizer.backend_tokenizer.to_str()
    content = json.loads(text)
    model = content["model"]
    # Older files spell a merge "a b", newer ones ["a", "b"].
    merges = [m.split(" ", 1) if isinstance(m, str) else m for m in model.get("merges", [])]
    decides = {key: content.get(key) for key in ("normalizer", "pre_tokenizer")}
    added = sorted([token["id"], token["content"]] for token in content.get("added_tokens", []))
    decides |= {"model": {**model, "merges": merges}, "added_tokens": added}
    return hashlib.sha256(canonical_json(decides).encode()).hexdigest()


def digest_of(tokenizer: ModelSpec | Path | str | None) -> str | None:
    """Return the digest of the tokenizer of a spec, in a folder or on the hub; None for a model without one."""
    where: Path | str | None
    if isinstance(tokenizer, ModelSpec):
        where = tokenizer.tokenizer or tokenizer.source or tokenizer.teacher
    else:
        where = tokenizer
    if where is None or (Path(where).is_dir() and not (Path(where) / "tokenizer.json").is_file()):
        return None
    return tokenizer_digest(load_tokenizer(tokenizer or where))


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files of a tokenizer in a folder that may have been downloaded, by path, to be published with a student.

    Only `TOKENIZER_FILES`, named chat templates and the generation settings beside them, and none by a link: a link may
    lead to a file of the user's. UsageError: one is a link, or cannot be read.
    """
    names, named = (*TOKENIZER_FILES, GENERATION_CONFIG_NAME), folder / "additional_chat_templates"
    paths = [*(folder / name for name in names if os.path.lexists(folder / name)), *sorted(named.glob("*.jinja"))]
    for path in (named, *paths):
        if path.is_symlink():
            raise UsageError(f"{path} is a link, and what it leads to is not exported; put a copy there")
    try:
        return {path.relative_to(folder).as_posix(): read_bytes(path, LARGE) for path in paths}
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: a file of the tokenizer cannot be read: {error}") from error


def export_model(
    model: nn.Module,
    tokenizer: Mapping[str, bytes] | None,
    out: Path,
    *,
    dtype: str | None = None,
    origin: Mapping[str, Any] | None = None,
    shard_gb: float = 5.0,
    int8: bool = False,
    beside: Mapping[str, bytes] | None = None,
) -> Path | None:
    """Write a folder that `transformers.AutoModelForCausalLM` and `AutoTokenizer` load, and publish it whole.

    model: a model or a `SplitModel`, whose adapters are added to its weights; special tokens and generation settings
    that it does not have are completed from `tokenizer`, the files that `tokenizer_files` returns. out: inside
    `export_lock`, if another process may export there. dtype: of the written weights; by default the model's own.
    origin: entries for `kdtrain.json`, which also holds the sealed digests of all files. shard_gb: the largest file of
    weights. int8: quantise the weights (`kdtrain.models.int8`). beside: more files, by name. An earlier export is
    replaced; if it holds anything that was not exported, it is moved aside, and its new path returned.

    UsageError: `out` holds what kdtrain did not write. RunError: the disk is full or refuses the write.
    """

    def write(partial: Path) -> None:
        most = f"{max(1, round(shard_gb * 1e6))}KB"
        if not int8:
            _write_model(model, partial, dtype, most, partial if tokenizer else None)
            return
        with hidden_folder(out) as whole:
            _write_model(model, whole, dtype, most, partial if tokenizer else None)
            quantize_folder(whole, partial, most)

    return _publish(out, write, {**(tokenizer or {}), **(beside or {})}, origin)


def export_adapter(
    model: SplitModel,
    base: str,
    tokenizer: Mapping[str, bytes] | None,
    out: Path,
    *,
    dtype: str | None = None,
    origin: Mapping[str, Any] | None = None,
    beside: Mapping[str, bytes] | None = None,
) -> Path | None:
    """`export_model` of the adapters alone, as `peft` loads them over the model `base`, a folder or a hub id."""

    def write(partial: Path) -> None:
        assert model.lora is not None
        write_adapter(model.model, model.lora, base, partial, dtype)

    return _publish(out, write, {**(tokenizer or {}), **(beside or {})}, origin)


def _publish(
    out: Path, write: Callable[[Path], None], beside: Mapping[str, bytes], origin: Mapping[str, Any] | None
) -> Path | None:
    refuse_foreign(out)
    out = out.resolve()
    try:
        with making(out), hidden_folder(out) as partial, writing(out):
            for name, content in beside.items():
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).write_bytes(content)
            write(partial)
            digests = {name: file_digest(path) for name, path in files_below(partial).items()}
            publish_json(partial / ORIGIN, {**(origin or {}), "files": digests}, "export.origin")
            aside = swap_in(partial, out, "export")
            removed = aside is not None and remove_folder(aside, _exported(aside), "export.removing")
            return None if removed else aside
    except SafetensorError as error:
        raise RunError(f"{out}: the weights cannot be written: {one_line(error)}") from error


@contextmanager
def export_lock(out: Path, wait: float = 0.0) -> Iterator[None]:
    """Keep other exports out of `out` during the block, and remove what killed ones left.

    An export replaces the whole folder, so that the lock is a file beside it. wait: seconds to wait for another export.

    UsageError: another process exports there, `out` is a mount point, or its parent cannot be a folder. RunError: that
    is not writable.
    """
    refuse_mount(out)
    out = out.resolve()
    made = make_folder(out.parent)
    lock = None
    try:
        message = f"another process is exporting to {out}; wait for it, or name another folder"
        lock = Lock(hidden_lock(out), message, "export", wait)
        sweep(out.parent, of=out.name)
        yield
    finally:
        if lock is not None:
            lock.release()
        remove_empty(made)


def refuse_foreign(out: Path) -> None:
    """Refuse to export into a file, a folder that is not empty and not an export, or one that cannot be replaced.

    UsageError: see above and `refuse_displacing`.
    """
    refuse_displacing(out, {})
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; name a folder")
    if out.exists() and any(out.iterdir()) and not is_export(out):
        raise UsageError(f"{out} holds other files than an export; name another folder")


def is_export(folder: Path) -> bool:
    """Whether `export_model` wrote a folder, by its sealed `kdtrain.json`; its other files may have changed."""
    try:
        return bool(read_sealed(folder / ORIGIN))
    except (OSError, ValueError):
        return False


def _exported(folder: Path) -> set[str]:
    """The files of an export if all are unchanged, else none."""
    try:
        files = typed(read_sealed(folder / ORIGIN).get("files"), dict[str, str])
        sound = all(file_digest(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError):
        return set()
    return {ORIGIN, *files} if sound else set()


def _write_model(model: nn.Module, out: Path, dtype: str | None, most: str, tokenizer: Path | None) -> None:
    """Write configurations and weights, in files of at most `most`; `tokenizer`: the folder with its files."""
    whole: Any = _whole(model)
    if tokenizer is not None and whole.generation_config is not None:
        _complete_generation(whole, tokenizer)
    kind, state = None if dtype is None else getattr(torch, dtype), None
    if adapted(whole):
        state = merged_state(whole)
        if kind is not None:
            refuse_overflow(state, kind)
        state = {name: each.to(kind) if each.is_floating_point() else each for name, each in state.items()}
        if kind is not None:
            whole.config.dtype = kind
    elif kind is not None:
        refuse_overflow(whole.state_dict(), kind)
        whole = copy.deepcopy(whole).to(kind)
    whole.save_pretrained(out, state_dict=state, max_shard_size=most)


def _complete_generation(model: Any, folder: Path) -> None:
    """Give a model what it lacks of special tokens and generation settings, from the tokenizer's files in `folder`.

    Settings that came with the weights stay. Fresh weights have only those that transformers derives from their
    configuration, in which the end of text may stand in for a start that the tokenizer does not have.
    """
    own, config, tokenizer = model.generation_config, model.config, load_tokenizer(folder)
    ids = {f"{each}_token_id": _inside(config, getattr(tokenizer, f"{each}_token_id")) for each in _SPECIAL}
    if own._from_model_config:
        given = generation_of(folder)
        model.generation_config = given or own
        if ids["bos_token_id"] is None and getattr(config, "bos_token_id", None) == ids["eos_token_id"]:
            config.bos_token_id = None
        for key, value in ids.items():
            stated = getattr(config, key, None)
            if stated is None and value is not None:
                setattr(config, key, value)
            if stated in (None, value):  # else it is the user's, from [config]
                theirs = None if given is None else _inside(config, getattr(given, key))
                stated = value if theirs is None else theirs
            setattr(model.generation_config, key, stated)
    elif own.eos_token_id is None:
        own.eos_token_id = ids["eos_token_id"]
        own.pad_token_id = ids["pad_token_id"] if own.pad_token_id is None else own.pad_token_id
    else:
        return
    eos = model.generation_config.eos_token_id
    if model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = eos[0] if isinstance(eos, list) else eos


def _inside(config: Any, ids: int | list[int] | None) -> int | list[int] | None:
    """The ids that a model's vocabulary has; None for none."""
    size = config.get_text_config().vocab_size
    if isinstance(ids, list):
        return [each for each in ids if each < size] or None
    return None if ids is None or ids >= size else ids


def max_positions(model: nn.Module) -> int | None:
    """Return the longest sequence that the model's configuration allows, in tokens; None without a bound."""
    positions = getattr(_whole(model).config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def active_parameters(model: nn.Module) -> int:
    """The parameters that take part for one token: of the experts of a mixture only those to which it is routed."""
    experts, chosen = experts_of(_whole(model).config) or (1, 1)
    share = Fraction(chosen, experts)
    return int(sum(each.numel() * (share if ".experts." in name else 1) for name, each in model.named_parameters()))


def check_fits(model: SplitModel, name: str, seq_len: int, document_mask: bool) -> None:
    """Refuse sequences longer than a model's positions, and a document mask that it cannot apply."""
    longest = max_positions(model)
    if longest is not None and seq_len > longest:
        raise UsageError(f"--seq-len {seq_len} is beyond the {longest} positions of {name}; choose at most {longest}")
    if document_mask and not model.separates_documents:
        raise UsageError(f"{name} cannot keep packed documents apart; leave --document-mask out")


def _whole(model: nn.Module) -> PreTrainedModel:
    whole = model if isinstance(model, PreTrainedModel) else model.model
    assert isinstance(whole, PreTrainedModel)
    return whole


def _build(spec: ModelSpec, dtype: torch.dtype, vocab_size: int | None, seed: int) -> PreTrainedModel:
    if spec.kind != LOCAL:
        raise UsageError(f"{spec.name}: kind = '{spec.kind}' is of a teacher; a student's layers are local")
    if spec.init == "pretrained":
        return _pretrained(spec, dtype)
    model: Any
    if spec.init == "teacher-layers":
        teacher = _build(read_spec(cast(str, spec.teacher), "teachers"), torch.float32, None, seed)
        model = model_from_layers(spec, teacher, vocab_size)
    else:
        model = model_from_config(spec, vocab_size, seed)
    return model.to(dtype)


def _pretrained(spec: ModelSpec, dtype: torch.dtype) -> PreTrainedModel:
    source, trusted = cast(str, spec.source), spec.trust_remote_code
    config = ask_config(spec)
    attention = attention_option(spec.attention, config)
    options = {"revision": revision_of(spec), "dtype": dtype, "attn_implementation": attention}

    def load() -> Any:
        refuse_large_generation(source, revision_of(spec))
        if not trusted:
            refuse_foreign_weights(source, revision_of(spec))
        return AutoModelForCausalLM.from_pretrained(
            source, config=config, trust_remote_code=trusted, use_safetensors=True, output_loading_info=True, **options
        )

    model, found = ask(source, load)
    if missing := sorted(found["missing_keys"]):
        raise UsageError(f"{source}: the weights lack {missing[0]} and {len(missing) - 1} more of the model's")
    state_ties(model)
    return cast(PreTrainedModel, model)
