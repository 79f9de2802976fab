"""Export: a model or its adapters as a folder that transformers loads, published whole."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from kdtrain.errors import RunError, UsageError, first_sentence, making, writing
from kdtrain.files import (
    Lock,
    file_digest,
    files_below,
    hidden_folder,
    hidden_lock,
    make_folder,
    publish_json,
    read_sealed,
    refuse_displacing,
    refuse_mount,
    remove_empty,
    remove_folder,
    swap_in,
    sweep,
    typed,
)
from kdtrain.models.head import SplitModel
from kdtrain.models.loading import adapted, refuse_overflow, whole_model
from kdtrain.models.spec import ORIGIN, is_export
from kdtrain.models.tokenizer import SPECIAL, generation_of, load_tokenizer, savable_generation, tokenizer_files


def export_model(
    model: nn.Module,
    tokenizer: Path | None,
    out: Path,
    *,
    dtype: str | None = None,
    origin: Mapping[str, Any] | None = None,
    shard_gb: float = 5.0,
    int8: bool = False,
    beside: Mapping[str, bytes] | None = None,
    base: str | None = None,
    writer: Callable[[Path], None] | None = None,
) -> Path | None:
    """Write a folder that `transformers.AutoModelForCausalLM` and `AutoTokenizer` load, and publish it whole.

    model: a model or a `SplitModel`, whose adapters are added to its weights; special tokens and generation settings
    that it does not have are completed from `tokenizer`, the folder of its tokenizer, whose files go along. out: inside
    `export_lock`, if another process may export there. dtype: of the written weights; by default the model's own.
    origin: entries for `kdtrain.json`, which also holds the sealed digests of all files. shard_gb: the largest file of
    weights. int8: quantise the weights (`kdtrain.models.frozen`). beside: more files, by name. base: write the adapters
    alone, as `peft` loads them over this folder or hub id. writer: writes the model into a folder in a format of its
    own. An earlier export is replaced; if it holds anything that was not exported, it is moved aside, and its new path
    returned.

    UsageError: `out` holds what kdtrain did not write. RunError: the disk is full or refuses the write.
    """

    def write(partial: Path) -> None:
        if writer is not None:
            return writer(partial)
        most = f"{max(1, round(shard_gb * 1e6))}KB"
        if base is not None:
            assert isinstance(model, SplitModel) and model.lora is not None
            from kdtrain.models.adapters import write_adapter

            return write_adapter(model.model, model.lora, base, partial, dtype)
        if not int8:
            return _write_model(model, partial, dtype, most, partial if files else None)
        from kdtrain.models.frozen import quantize_folder

        with hidden_folder(out) as whole:
            _write_model(model, whole, dtype, most, partial if files else None)
            quantize_folder(whole, partial, most)

    _refuse_foreign(out)
    out = out.resolve()
    files = {} if tokenizer is None else tokenizer_files(tokenizer)
    try:
        with making(out), hidden_folder(out) as partial, writing(out):
            for name, content in {**files, **(beside or {})}.items():
                (partial / name).parent.mkdir(exist_ok=True)
                (partial / name).write_bytes(content)
            write(partial)
            digests = {name: file_digest(path) for name, path in files_below(partial).items()}
            publish_json(partial / ORIGIN, {**(origin or {}), "files": digests}, "export.origin")
            aside = swap_in(partial, out, "export")
            removed = aside is not None and remove_folder(aside, _exported(aside), "export.removing")
            return None if removed else aside
    except SafetensorError as error:
        raise RunError(f"{out}: the weights cannot be written: {first_sentence(error)}") from error


@contextmanager
def export_lock(
    out: Path, needed: Mapping[str, Path | str | None] | None = None, *, overwrite: bool = False, wait: float = 0.0
) -> Iterator[None]:
    """Keep other exports out of `out` during the block, and remove what killed exports left.

    An export replaces the whole folder, so that the lock is a file beside it. wait: seconds to wait for another export.

    needed: paths that the command reads, by the words that name them; None: whatever is there may be replaced.
    overwrite: an export may be.

    UsageError: another process exports there, `out` is a mount point, its parent cannot be a folder, or what is there
    must stay. RunError: that is not writable.
    """
    refuse_mount(out)
    given = out
    out = out.resolve()
    made = make_folder(out.parent)
    lock = None
    try:
        message = f"another process is exporting to {out}; wait for it, or name another folder"
        lock = Lock(hidden_lock(out), message, "export", wait)
        sweep(out.parent, of=out.name)
        if needed is not None:
            _refuse_foreign(given)
            refuse_displacing(given, needed)
            if given.exists() and any(given.iterdir()) and not overwrite:
                raise UsageError(f"--out {given} holds an exported model; name another folder, or add --overwrite")
        yield
    finally:
        if lock is not None:
            lock.release()
        remove_empty(made)


def _refuse_foreign(out: Path) -> None:
    """Refuse to export into a file, a folder that is not empty and not an export, or one that cannot be replaced.

    UsageError: see above and `refuse_displacing`.
    """
    refuse_displacing(out, {})
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; name a folder")
    if out.exists() and any(out.iterdir()) and not is_export(out):
        raise UsageError(f"{out} holds other files than an export; name another folder")


def _exported(folder: Path) -> set[str]:
    """Return the files of an export, its record among them, if all are unchanged; else an empty set."""
    try:
        files = typed(read_sealed(folder / ORIGIN).get("files"), dict[str, str])
        sound = all(file_digest(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError):
        return set()
    return {ORIGIN, *files} if sound else set()


def _write_model(model: nn.Module, out: Path, dtype: str | None, most: str, tokenizer: Path | None) -> None:
    """Write configurations and weights, in files of at most `most`; `tokenizer`: the folder with its files."""
    whole: Any = whole_model(model)
    if tokenizer is not None and whole.generation_config is not None:
        complete_generation(whole, tokenizer)
    if whole.generation_config is not None:
        whole.generation_config = savable_generation(whole.generation_config)
    kind = None if dtype is None else getattr(torch, dtype)
    merged = None
    state = whole_state(whole, kind)
    if adapted(whole):
        merged = {name: each.to(kind) if each.is_floating_point() else each for name, each in state.items()}
        if kind is not None:
            whole.config.dtype = kind
    elif kind is not None:
        whole = copy.deepcopy(whole).to(kind)
    whole.save_pretrained(out, state_dict=merged, max_shard_size=most)


def whole_state(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Return the weights of a model, adapters added to them. UsageError: one is too large for `dtype`."""
    state = model.state_dict()
    if adapted(model):
        from kdtrain.models.adapters import merged_state

        state = merged_state(model)
    if dtype is not None:
        refuse_overflow(state, dtype)
    return state


def complete_generation(model: Any, folder: Path) -> None:
    """Give a model the special tokens and generation settings that it lacks, from the tokenizer's files in `folder`.

    Settings that came with the weights stay. Fresh weights have only those that transformers derives from their
    configuration, in which the end of text may stand in for a start that the tokenizer does not have.
    """
    own = model.generation_config
    config = model.config
    tokenizer = load_tokenizer(folder)
    ids = {f"{each}_token_id": _inside(config, getattr(tokenizer, f"{each}_token_id")) for each in SPECIAL}
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
    """Return the ids that are in a model's vocabulary; None if there are none."""
    size = config.get_text_config().vocab_size
    if isinstance(ids, list):
        return [each for each in ids if each < size] or None
    return None if ids is None or ids >= size else ids
