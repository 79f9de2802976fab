"""Requests to transformers and the hub: errors in one line, and refusals of what a model's files may not request.

`transformers` reports a failed load by many types of exception of several lines, among warnings and progress bars, and
asks on stdin whether to run code that comes with a model. `ask` turns any exception into a `UsageError` of one line,
and the question off; the command turns off the warnings and bars.

A configuration looks like data. To transformers it also names Python files to run, attention kernels to fetch from the
hub, packages to import and pickled weights to read, and any other key becomes an attribute of an object, even in place
of a method. The author of a model folder, a run or a spec may have written such a key, so it is refused in one line
before transformers reads it. `trust_remote_code = true` in a spec lifts the rules about code; sizes that no model has
are always refused, because building such a model would not end.

What it gives up: a passing failure, such as a lost connection, looks like a request that always fails. The refusals
list what transformers 5 is known to act on, and prove nothing; any other failure is an error, of which `ask` makes a
line.
"""

import contextlib
import errno
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import tokenizers
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    __version__,
    dynamic_module_utils,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.auto.tokenization_auto import get_tokenizer_config, tokenizer_class_from_name
from transformers.tokenization_utils_base import get_fast_tokenizer_file
from transformers.utils import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
    is_flash_attn_2_available,
)

from kdtrain.config.choices import FORMATS
from kdtrain.errors import UsageError, first_sentence, panics_refused
from kdtrain.files import (
    LARGE,
    file_digest,
    json_digest,
    parse_json,
    read_bytes,
    read_text,
    refuse_leading_out,
    typed,
)
from kdtrain.models.spec import ATTENTIONS, ModelSpec, is_hub_id, model_file
from kdtrain.models.tokenizer_limits import entries_of, refuse_endless
from kdtrain.net.address import no_network
from kdtrain.sandbox import LimitExceeded, try_once

MAX_LAYERS = 1000
"""Layers are made one by one; the deepest models have about 130."""
MOST_JSON = 2**25
"""Most bytes of a configuration or an index of weights; the largest known has 9e6."""
_MOST_ENTRIES = 2**16
"""Most entries of a configuration; of a million end tokens, transformers takes half a minute."""
_LOAD_SECONDS, _LOADED_A_SECOND, _LOAD_MEMORY = 5.0, 2**22, 2**32
"""Processor time and memory that loading a tokenizer may take, with more for each byte of it; 33 MB take 2 s."""
_READ_WHOLE = (
    *("*config.json", "*.index.json", "*token*.json", "vocab.*", "merges.txt", "*.model"),
    *("chat_template*", "additional_chat_templates/*"),
)

TOKENIZER_FILES = (
    *("added_tokens.json", "chat_template.jinja", "merges.txt", "sentencepiece.bpe.model", "special_tokens_map.json"),
    *("spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
)
"""The files of a tokenizer that are copied with it; named chat templates lie in a folder of their own."""
_TEMPLATE_NAME = re.compile(r"\w[\w .,:()+-]{0,99}")
"""A chat template's name, which becomes a file name."""

_IMPLEMENTATIONS = (None, *ATTENTIONS, "grouped_mm", "batched_mm")
"""Of attention and of experts; any other name is a kernel on the hub, or unknown."""
_IMPLEMENTATION = re.compile("(?:attn|experts)_implementation")
_REDIRECTING = ("attribute_map", "sub_configs", "sub_configs_defaults", "_auto_class")
_ONE_BY_ONE = re.compile("n(?:um)?_(?:hidden_)?(?:layers?|labels)")
_DROPOUT = re.compile("(?:dropout|pdrop)(?:_prob|_rate|_p)?$")
_AT_LEAST_ONE = re.compile(
    "vocab_size|hidden_size|intermediate_size|num_hidden_layers|num_(?:attention|key_value)_heads|head_dim|n_(?:embd|layer|head)"
)


class ModelFile(Protocol):
    """A whole model in one file, opened; a package registers what opens files of an ending (`FORMATS`)."""

    folder: Path
    """What transformers saves of a model but its weights: configuration, tokenizer, settings for sampling."""

    @property
    def facts(self) -> dict[str, str]:
        """Return what a manifest states of it: `file_digest` (SHA-256) and `quantised`."""

    def load(self, config: PreTrainedConfig, **options: Any) -> tuple[Any, dict[str, Any]]:
        """Load the model, with `options` as `from_pretrained` has them; return it with transformers' account."""


def opened(source: str | None) -> ModelFile | None:
    """Open a model's file of a registered format; None for a folder or hub id. UsageError: it cannot be read."""
    file = None if source is None else model_file(Path(source))
    return None if file is None else FORMATS.get(Path(file).suffix[1:])(file)


def _folder_of(source: str) -> str:
    """Return where the configuration and the tokenizer of a source lie. UsageError: `refuse_odd_files`."""
    file = opened(source)
    folder = source if file is None else str(file.folder)
    refuse_odd_files(folder)
    return folder


def refuse_impossible(source: str, table: dict[str, Any]) -> None:
    """Refuse a configuration (JSON or TOML, at any depth) with sizes that no model has."""
    if sum(1 for _ in entries_of(table)) > _MOST_ENTRIES:
        raise UsageError(f"{source}: its configuration has more than {_MOST_ENTRIES:,} entries; mend it")
    for key, value in entries_of(table):
        if _DROPOUT.search(key) and type(value) in (int, float) and not 0 <= value <= 1:
            raise UsageError(f"{source}: {key} = {value}: a dropout is between 0 and 1; mend its configuration")
        if type(value) is not int:
            continue
        if _AT_LEAST_ONE.fullmatch(key) and value < 1:
            raise UsageError(f"{source}: {key} = {value}: a model needs at least 1; mend its configuration")
        if _ONE_BY_ONE.fullmatch(key) and value > MAX_LAYERS:
            raise UsageError(f"{source}: {key} = {value:,}: at most {MAX_LAYERS:,} can be made")
    heads, shared = (table.get(f"num_{kind}_heads") for kind in ("attention", "key_value"))
    if type(heads) is int and type(shared) is int and heads % shared:
        raise UsageError(
            f"{source}: num_key_value_heads = {shared} does not divide num_attention_heads = {heads}; "
            "choose one that does"
        )


def refuse_odd_files(source: str) -> None:
    """Refuse a folder in which a file that transformers reads whole is too large, a pipe, which would block, or a link.

    What a link leads to would become a part of caches and students that are published. The hub's cache keeps its files
    behind links, in `blobs` beside the folder of all revisions.
    """
    folder = Path(source)
    homes = (folder, folder.resolve() / ".." / ".." / "blobs")
    for path in (path for pattern in _READ_WHOLE for path in folder.glob(pattern)):
        refuse_leading_out(path, homes)
        limit = LARGE if path.name.startswith(("tokenizer.", "vocab.", "merges.")) else MOST_JSON
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise UsageError(f"{path} is not a regular file; remove it")
        if path.is_file() and path.stat().st_size > limit:
            raise UsageError(f"{path} has more than {limit:,} bytes; a model's file of that name is smaller")


def refuse_code(source: str, table: dict[str, Any]) -> None:
    """Refuse a configuration (JSON or TOML, at any depth) that makes transformers run, fetch or unpickle."""
    if "auto_map" in table and table.get("model_type") not in list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        raise UsageError(f"{source}: it has its own code; if you trust that, set trust_remote_code = true in a TOML")
    _refuse_replacements(source, table)
    for key, value in entries_of(table):
        if _IMPLEMENTATION.search(key) and value not in _IMPLEMENTATIONS:
            raise UsageError(
                f"{source}: {key} = {_short(value)} in its configuration names a kernel from elsewhere; take it out"
            )
        if key == "quantization_config" and value is not None:
            raise UsageError(
                f"{source}: its weights are quantised, which other packages read; take a copy that is not, "
                "or, if you trust it, set trust_remote_code = true in a TOML"
            )
        if key == "transformers_weights" and not (value is None or _is_safe_name(value)):
            raise UsageError(f"{source}: transformers_weights = {_short(value)} is not a safetensors file; take it out")


def refuse_foreign_weights(source: str, revision: str) -> None:
    """Refuse a folder or hub id whose weights are an adapter, or whose index names anything but safetensors beside it.

    transformers unpickles any file that an index names, even with `use_safetensors`.
    """
    if _file(source, "adapter_config.json", revision) is not None:
        raise UsageError(f"{source}: it holds an adapter (adapter_config.json), which is not read; merge it first")
    index = _file(source, SAFE_WEIGHTS_INDEX_NAME, revision)
    if index is None:
        return
    for name in set(parse_json(index.read_text(encoding="utf-8"))["weight_map"].values()):
        if not _is_safe_name(name):
            raise UsageError(f"{source}: {index.name} names {_short(name)}, which is not a safetensors file beside it")


def has_weights(spec: ModelSpec) -> bool:
    """Return whether the weights of a spec are on this machine, without fetching any; fresh weights always are."""
    if not spec.is_local or spec.init != "pretrained" or opened(spec.source):
        return True

    def here() -> bool:
        with never_asking(offline=True):
            index = _file(str(spec.source), SAFE_WEIGHTS_INDEX_NAME, revision_of(spec))
            table = {} if index is None else parse_json(read_text(index, MOST_JSON))["weight_map"]
            names = set(table.values()) or {SAFE_WEIGHTS_NAME}
            return all(_file(str(spec.source), name, revision_of(spec)) for name in names)

    return ask(str(spec.source), here)


def refuse_large_generation(source: str, revision: str) -> None:
    """Refuse settings for sampling (generation_config.json) with sizes that no model has."""
    if (path := _file(source, GENERATION_CONFIG_NAME, revision)) is not None:
        refuse_impossible(source, {"generation": parse_json(read_text(path, MOST_JSON))})


def refuse_foreign_tokenizer(source: str, revision: str) -> None:
    """Refuse a tokenizer whose class is not a tokenizer: transformers loads any of its classes by name, models too."""
    try:
        config = PreTrainedConfig.get_config_dict(source, revision=revision)[0]
    except OSError:  # a tokenizer alone, or nothing; transformers then reports what is missing
        config = {}
    _refuse_replacements(source, config)
    refuse_impossible(source, config)
    for table in (get_tokenizer_config(source, revision=revision), config):
        name = table.get("tokenizer_class")
        found = None if name is None else tokenizer_class_from_name(name)
        if found is not None and not (isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)):
            raise UsageError(f"{source}: tokenizer_class = {_short(name)} is not a tokenizer; mend its configuration")


def refuse_slow_tokenizer(source: str, revision: str) -> None:
    """Refuse a tokenizer whose files would keep `tokenizers` busy without end, in use (`tokenizer_limits`) or, as a
    child process with limits finds out once, when it is loaded.
    """
    # transformers searches these names for the version, so that a name may be a path
    names = get_tokenizer_config(source, revision=revision).get("fast_tokenizer_files", [])
    if not isinstance(names, list) or any(not isinstance(name, str) or Path(name).name != name for name in names):
        raise UsageError(f"{source}: fast_tokenizer_files = {_short(names)} is not a list of names; take it out")
    fast = get_fast_tokenizer_file(names)
    files = [each for name in {*TOKENIZER_FILES, CONFIG_NAME, fast} if (each := _file(source, name, revision))]
    for path in files:
        if path.name == fast:
            refuse_endless(path)
    seconds = _LOAD_SECONDS + sum(each.stat().st_size for each in files) / _LOADED_A_SECOND
    digests = {each.name: file_digest(each) for each in files}

    def load(_: None) -> None:
        constants.HF_HUB_OFFLINE = True
        try:
            found = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
            found.backend_tokenizer.encode("a")
            found.backend_tokenizer.to_str()
        except MemoryError:
            raise
        except BaseException:  # a panic in Rust is no Exception; who loads it next meets the same, and reports it
            pass

    try:
        try_once(
            json_digest([__version__, tokenizers.__version__, digests]), load, memory=_LOAD_MEMORY, seconds=seconds
        )
    except LimitExceeded:
        raise UsageError(
            f"{source}: its tokenizer takes more than {seconds:.0f} s or {_LOAD_MEMORY >> 30} GiB to load; use another "
            "tokenizer"
        ) from None


def _refuse_replacements(source: str, table: dict[str, Any]) -> None:
    """Refuse entries that, as attributes, would replace methods or redirect other attributes."""
    for key, _ in entries_of(table):
        if key.startswith("__") or key in _REDIRECTING or callable(getattr(PreTrainedConfig, key, None)):
            raise UsageError(f"{source}: {key} in its configuration would replace a part of transformers; take it out")


def _file(source: str, name: str, revision: str) -> Path | None:
    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(source, name, revision=revision, **quiet)
    return None if found is None else Path(found)


def _is_safe_name(name: object) -> bool:
    return isinstance(name, str) and name == Path(name).name and name.endswith(".safetensors")


def _short(value: object) -> str:
    return repr(value)[:80]


# A fragment of a message of transformers, and what it means to the user.
_EXPLANATIONS = {
    "model.safetensors": "no weights in safetensors there; other formats are not read, nothing is unpickled",
    "couldn't connect": "no such folder, and the hub cannot be reached; check the name and the network",
    "not a valid model identifier": "no such folder, and no such model on the hub; check the name",
    "custom code": "it has its own code; if you trust that, set trust_remote_code = true in a TOML",
    "Unrecognized configuration class": "it is not a causal language model; take one that is",
    "Should have a `model_type` key": "its config.json has no model_type; fetch or export the model again",
    "not a valid JSON file": "its config.json is not valid JSON; fetch or export the model again",
    "FlashAttention2": "flash_attention_2 is not installed here; take attention = 'sdpa'",
    "backend tokenizer": "no tokenizer.json there; save its tokenizer as a fast one",
}

Answer = TypeVar("Answer")


_asking_lock = threading.Lock()
_inside: list[tuple[int, bool]] = []  # one for each caller of never_asking, the first one's is what to restore


@contextlib.contextmanager
def never_asking(offline: bool = False) -> Iterator[None]:
    """Keep transformers from asking on stdin in the block: it refuses at once the code of a model that nobody trusted.

    offline: True if it may not ask the hub either, and only has what was fetched before.

    An argument is not enough, because it does not reach the parts of composite models. Threads may be inside side by
    side: the last to leave restores what the first one found.
    """
    with _asking_lock:
        now = (dynamic_module_utils.TIME_OUT_REMOTE_CODE, constants.HF_HUB_OFFLINE)
        _inside.append(_inside[0] if _inside else now)
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
        constants.HF_HUB_OFFLINE = now[1] or offline
    try:
        yield
    finally:
        with _asking_lock:
            before = _inside.pop()
            if not _inside:
                dynamic_module_utils.TIME_OUT_REMOTE_CODE, constants.HF_HUB_OFFLINE = before


def ask(source: str, load: Callable[[], Answer]) -> Answer:
    """Call `load`; turn any exception into a `UsageError` of one line that begins with `source`.

    Out of memory and a full disk pass through: the same request may work elsewhere.
    """
    try:
        offline = is_hub_id(source) and not constants.HF_HUB_OFFLINE and no_network(constants.ENDPOINT)
        with panics_refused(f"{source}: cannot be loaded"), never_asking(offline):
            return load()
    except (torch.OutOfMemoryError, MemoryError, UsageError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise
        line = first_sentence(error)
        known = [meaning for fragment, meaning in _EXPLANATIONS.items() if fragment in str(error)]
        if isinstance(error, SafetensorError):
            known = [f"the weights are damaged ({line}); fetch or export them again"]
        raise UsageError(f"{source}: {known[0] if known else f'cannot be loaded: {line}'}") from error


def revision_of(spec: ModelSpec) -> str:
    """Return the branch, tag or commit of a spec on the hub, `main` where it states none."""
    return spec.revision or "main"


def attention_option(attention: str, config: PreTrainedConfig) -> str | None:
    """Return `attn_implementation` for transformers from a spec's or a checkpoint's `attention`. Raises `UsageError`.

    None for sdpa and an unresolved auto: with "sdpa" transformers fails for a model without it, with None it uses eager
    there. Eager for a soft cap of the scores, which the sdpa of some releases (5.17) leaves out without a word. Refuses
    flash_attention_2 that is not installed, because transformers may fetch another one from the hub.
    """
    if attention not in ATTENTIONS:
        raise UsageError(f"attention = {attention!r} is unknown; use {', '.join(ATTENTIONS)}")
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise UsageError("flash_attention_2 is not installed here; take attention = 'sdpa'")
    if attention in ("auto", "sdpa"):
        return "eager" if getattr(config.get_text_config(), "attn_logit_softcapping", None) else None
    return attention


def ask_config(spec: ModelSpec) -> PreTrainedConfig:
    """Load the configuration of a folder or hub id. Raises `UsageError`."""
    source = cast(str, spec.source)
    revision = revision_of(spec)

    def load() -> PreTrainedConfig:
        folder = _folder_of(source)
        table, _ = PreTrainedConfig.get_config_dict(folder, revision=revision)
        if not spec.trust_remote_code:
            refuse_code(source, table)
        refuse_impossible(source, table)
        config = AutoConfig.from_pretrained(folder, revision=revision, trust_remote_code=spec.trust_remote_code)
        return cast(PreTrainedConfig, config)

    return ask(source, load)


def ask_tokenizer(source: str, *, revision: str = "main", trust_remote_code: bool) -> PreTrainedTokenizerFast:
    """Load a fast tokenizer from a folder or the hub. Raises `UsageError`."""

    def load() -> Any:
        folder = _folder_of(source)
        if not trust_remote_code:
            refuse_foreign_tokenizer(folder, revision)
        refuse_slow_tokenizer(folder, revision)
        return AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=trust_remote_code)

    tokenizer = ask(source, load)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UsageError(f"{source}: its tokenizer has no tokenizer.json; save it as a fast tokenizer first")
    refuse_template_names(source, tokenizer)
    return tokenizer


def refuse_template_names(source: str, tokenizer: Any) -> None:
    """Refuse a tokenizer whose chat templates have names that lead out of a folder, into which transformers writes."""
    templates = getattr(tokenizer, "chat_template", None)
    for name, text in templates.items() if isinstance(templates, dict) else ():
        if not (isinstance(name, str) and _TEMPLATE_NAME.fullmatch(name) and isinstance(text, str)):
            raise UsageError(f"{source}: its chat template {_short(name)} is not a name and a text; take it out")


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Call the tokenizer's `save_pretrained`, which writes into the existing `folder` and nowhere else.

    UsageError: a name in the tokenizer leads out of the folder.
    """
    refuse_template_names("the tokenizer", tokenizer)
    tokenizer.save_pretrained(folder)


def ask_generation(source: str, revision: str = "main") -> dict[str, Any] | None:
    """Read the generation settings that the author of a model wrote, in a folder or on the hub. Raises `UsageError`.

    None where there are none, or where transformers derived them from the model's configuration.
    """

    def load() -> Any:
        folder = _folder_of(source)
        path = _file(folder, GENERATION_CONFIG_NAME, revision)
        table = None if path is None else typed(parse_json(read_bytes(path, MOST_JSON).decode()), dict[str, Any])
        return None if table is None or table.get("_from_model_config") else table

    return cast(dict[str, Any] | None, ask(source, load))
