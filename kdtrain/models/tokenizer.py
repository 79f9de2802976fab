"""A tokenizer and the generation settings that came with it: loading, saving, and a digest of what decides the ids.

That a text ends is one event, and models write it with different tokens: a base model with `<|endoftext|>`, the same
model after instruction tuning with `<|im_end|>`, some with either. A student of a teacher's text learns the teacher's
tokens, also that for the end; so it must stop at those, whatever its own settings say (`learn_ends`).
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import GENERATION_CONFIG_NAME

from kdtrain.data.bytes import TokenBytes
from kdtrain.errors import RunError, UsageError, printable
from kdtrain.files import LARGE, canonical_json, read_bytes, read_text
from kdtrain.models.hub import (
    TOKENIZER_FILES,
    ask,
    ask_generation,
    ask_tokenizer,
    refuse_impossible,
    revision_of,
    save_tokenizer,
)
from kdtrain.models.spec import ModelSpec

SPECIAL = ("bos", "eos", "pad")
"""Special tokens of generation settings."""
_SHOWN = 4


def load_tokenizer(source: ModelSpec | str | Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a spec, a folder or a hub id. Raises `UsageError` if there is none."""
    if (found := _place_of(source)) is None:
        name = source.name if isinstance(source, ModelSpec) else source
        raise UsageError(f"{name}: this spec names no tokenizer; add tokenizer = a folder or hub id")
    place, revision, trusted = found
    return ask_tokenizer(place, revision=revision, trust_remote_code=trusted)


def _place_of(source: ModelSpec | str | Path) -> tuple[str, str, bool] | None:
    """Return the folder or hub id of the tokenizer of a spec, its revision, and whether its code is trusted."""
    if not isinstance(source, ModelSpec):
        return str(source), "main", False
    if source.tokenizer is not None:
        return source.tokenizer, "main", source.trust_remote_code
    if source.teacher is not None:
        return _place_of(ModelSpec.read(source.teacher, "teachers"))
    return None if source.source is None else (source.source, revision_of(source), source.trust_remote_code)


def generation_of(source: ModelSpec | str | Path) -> GenerationConfig | None:
    """Load the generation settings that came with a tokenizer (as `load_tokenizer` finds it): a chat model's end tokens
    and sampling.

    None where its author wrote none. Raises `UsageError` if they cannot be read.
    """
    if (place := _place_of(source)) is None:
        return None
    found = ask_generation(*place[:2])
    return None if found is None else generation_from("generation_config.json", found)


def ends_of(spec: ModelSpec, tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that end a teacher's texts, ascending.

    They come from its tokenizer and from the generation settings that came with that and with its weights. Raises
    `UsageError` if they cannot be read.
    """
    sources = [spec, replace(spec, tokenizer=None)] if spec.tokenizer and spec.source else [spec]
    return tuple(sorted({each for source in sources for each in end_tokens(generation_of(source), tokenizer)}))


class ChatTokenizer:
    """A tokenizer that saves the generation settings that came with it beside its own files."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, generation: GenerationConfig | None) -> None:
        self.tokenizer, self.generation = tokenizer, generation

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, spec: ModelSpec) -> "ChatTokenizer":
        """Pair the tokenizer of a spec with its settings. UsageError: they cannot be read."""
        return cls(tokenizer, generation_of(spec))

    def save_pretrained(self, folder: Path) -> None:
        """Write the files into an existing folder, and nowhere else."""
        save_tokenizer(self.tokenizer, folder)
        if self.generation is not None:
            self.generation.save_pretrained(folder)


def savable_generation(given: GenerationConfig) -> GenerationConfig:
    """Return `given`, or its special tokens alone if transformers loads it but refuses to write it."""
    try:
        given.validate(strict=True)
    except (ValueError, TypeError):
        return GenerationConfig(**{f"{each}_token_id": getattr(given, f"{each}_token_id") for each in SPECIAL})
    return given


def generation_from(name: str, table: Mapping[str, Any]) -> GenerationConfig:
    """Make the generation settings in the table of an unknown author. Raises `UsageError` that begins with `name`."""
    # GenerationConfig takes any name, even that of one of its methods
    known = GenerationConfig().to_dict().keys()
    kept = {key: value for key, value in table.items() if key in known}
    refuse_impossible(name, kept)
    return savable_generation(ask(name, lambda: GenerationConfig(**kept)))


def tokenizer_digest(tokenizer: Any) -> str:
    """Return the SHA-256 over the parts of a tokenizer that decide the ids.

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
    """Read the files of a tokenizer in a folder that may have been downloaded, by path, to publish with a student.

    Only `TOKENIZER_FILES`, named chat templates and the generation settings beside them, and none by a link: a link may
    lead to a file of the user's. UsageError: one is a link, or cannot be read.
    """
    names = (*TOKENIZER_FILES, GENERATION_CONFIG_NAME)
    named = folder / "additional_chat_templates"
    paths = [*(folder / name for name in names if os.path.lexists(folder / name)), *sorted(named.glob("*.jinja"))]
    for path in (named, *paths):
        if path.is_symlink():
            raise UsageError(f"{path} is a link, and what it leads to is not exported; put a copy there")
    try:
        return {path.relative_to(folder).as_posix(): read_bytes(path, LARGE) for path in paths}
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder}: a file of the tokenizer cannot be read: {error}") from error


def byte_lengths(folder: Path | None) -> np.ndarray | None:
    """Return how many bytes each token of the tokenizer in `folder` has, then 0 for any other id; None if unknown."""
    if folder is None or not (folder / "tokenizer.json").is_file():
        return None
    try:
        return np.append(TokenBytes.of(load_tokenizer(folder)).lengths, 0)
    except (UsageError, RunError):
        return None


def end_tokens(generation: GenerationConfig | None, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the ids that end a text, ascending, by the generation settings of a model and its tokenizer."""
    stated = getattr(generation, "eos_token_id", None)
    found = set(stated if isinstance(stated, list | tuple) else [stated])
    found.add(getattr(tokenizer, "eos_token_id", None))
    return tuple(sorted(each for each in found if type(each) is int and each >= 0))


def filler_token(tokenizer: Any, ends: tuple[int, ...]) -> int:
    """Return the id that fills a row behind its text: the id for padding, or the lowest, but none that ends a text."""
    choices = (getattr(tokenizer, "pad_token_id", None), *range(len(ends) + 1))
    return next(each for each in choices if each is not None and each not in ends)


def named(tokens: tuple[int, ...], tokenizer: Any) -> str:
    """Describe ids with their texts, for a message."""
    shown = []
    for each in tokens[:_SHOWN]:
        text = str(tokenizer.convert_ids_to_tokens(each)) if each < len(tokenizer) else "no token"
        shown.append(f"{each} ({printable(text)[:40]})")
    more = f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else ""
    return f"{', '.join(shown)}{more}"


def learn_ends(model: Any, taught: tuple[int, ...], tokenizer: Any) -> str | None:
    """Make a student's generation stop at the end tokens of the texts that it learns from too.

    taught: the teacher's. tokenizer: the teacher's. A line for people if they differ from the student's own; else None.
    """
    settings = getattr(model, "generation_config", None)
    own = end_tokens(settings)
    missing = [each for each in taught if each not in own]
    if settings is None or not own or not missing:
        return None  # a student without any gets the tokenizer's and the teacher's settings at its export
    settings.eos_token_id = sorted({*own, *taught})
    if settings._from_model_config:
        model.config.eos_token_id = settings.eos_token_id  # from which an export derives the others
    return (
        f"the teacher's texts end with {named(taught, tokenizer)}, the student's own with {named(own, tokenizer)}: one "
        "event; it learns the teacher's, and its export stops at either"
    )
