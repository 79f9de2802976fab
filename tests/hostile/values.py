"""Numbers that cannot be, in files of the right form: shards, manifests, checkpoints, weights, log-probabilities."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.hostile.case import MISSING, Attack, Cases, Place, changed, curried, in_json, in_spec, in_state, put, words
from tests.hostile.shapes import CHECKPOINT, header_of, in_shards, write_as, write_safetensors

V, K, D = 300, 10, 6
"""Vocabulary, kept entries and drawn entries of the cache."""
NAN, INF = float("nan"), float("inf")


def cases() -> Cases:
    """List cases of values in shards, records of the cache, checkpoints, weights, log-probabilities and specs."""
    found = Cases("values")
    _shards(found)
    _records(found)
    _checkpoints(found)
    _weights(found)
    for name, change in _LOGPROBS.items():
        found.add(f"log-probabilities: {name}", "logprobs", _logprobs(change), ends="either", says="logprobs")
    for name, value, ends in _SPEC:
        found.add(f"student with {name} = {value}", "distill", in_spec(name, value), ends=ends, says="student")
        attack = in_json("teacher/config.json", name, value)
        found.add(f"teacher with {name} = {value}", "build", attack, ends=ends, says="teacher")
    return found


def _filled(value: float, where: Any = ...) -> Callable[[np.ndarray], np.ndarray]:
    def change(values: np.ndarray) -> np.ndarray:
        values = values.copy()
        values[where] = value
        return values

    return change


_LABEL, _ENTRIES, _COUNTS, _TAIL = np.s_[:, -1], np.s_[:, :K], np.s_[:, K : K + D], np.s_[:, K + D : -1]
_SHARDS: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray], str]] = {
    "one token is V": ("tokens", _filled(V, np.s_[0, 5]), "refused"),
    "tokens 65,535": ("tokens", _filled(65_535), "refused"),
    "last token V + 1": ("tokens", _filled(V + 1, np.s_[-1, -1]), "refused"),
    "one mask of 7": ("loss_mask", _filled(7, np.s_[0, 3]), "refused"),
    "masks of 255": ("loss_mask", _filled(255), "refused"),
    "no label counts": ("loss_mask", _filled(0), "either"),
    "no label has numbers": ("loss_mask", _filled(2), "either"),
    "segments 255": ("segments", _filled(255), "refused"),
    "segments that fall": (
        "segments",
        lambda values: np.broadcast_to(np.arange(32, 0, -1, np.uint8), values.shape),
        "either",
    ),
    "one id code of 65,535": ("ids", _filled(65_535, np.s_[0, 0, 0]), "refused"),
    "id codes 60,000": ("ids", _filled(60_000), "refused"),
    "id codes just behind the lists": ("ids", _filled(64 + 1 + 2 * V + 9), "refused"),
    "id codes of absent entries": ("ids", _filled(0), "either"),
    "one id everywhere": ("ids", _filled(66), "either"),
    "log p of labels far below": ("numbers", _filled(65_534, _LABEL), "refused"),
    "log p of labels never written": ("numbers", _filled(65_535, _LABEL), "refused"),
    "log p of the first entry not a number": ("numbers", _filled(65_000, np.s_[:, 0]), "refused"),
    "log p of all entries 0": ("numbers", _filled(0, _ENTRIES), "either"),
    "log p that falls around the corner": ("numbers", _filled(40_000, np.s_[:, 1:3]), "either"),
    "counts 0": ("numbers", _filled(0, _COUNTS), "either"),
    "counts of 7 in 6 draws": ("numbers", _filled(7, np.s_[:, K : K + 1]), "refused"),
    "counts of 256": ("numbers", _filled(256, _COUNTS), "refused"),
    "counts of 65,535": ("numbers", _filled(65_535, _COUNTS), "refused"),
    "tail far up": ("numbers", _filled(65_532, _TAIL), "either"),
    "tail far down": ("numbers", _filled(65_531, _TAIL), "either"),
    "tail empty": ("numbers", _filled(65_535, np.s_[:, K + D]), "either"),
    "weights NaN": ("dictionary/tail_weights", _filled(NAN), "refused"),
    "one weight infinite": ("dictionary/tail_weights", _filled(INF, np.s_[0, 0]), "refused"),
    "weights 1e38": ("dictionary/tail_weights", _filled(1e38), "refused"),
    "weights that have no solution": ("dictionary/tail_weights", lambda values: _singular(values), "refused"),
    "candidates V": ("dictionary/candidates", _filled(V), "refused"),
    "candidates 65,534": ("dictionary/candidates", _filled(65_534), "refused"),
    "common entries V": ("dictionary/common", _filled(V), "refused"),
    "one common entry 65,534": ("dictionary/common", _filled(65_534, np.s_[0]), "refused"),
    "rows of candidates that are not there": ("dictionary/context_row", _filled(255), "refused"),
}


def _singular(weights: np.ndarray) -> np.ndarray:
    """Change the weights so that each number is predicted by itself."""
    number, width = len(weights), weights.shape[1] - len(weights)
    changed = weights.copy()
    changed[:, width:] = np.eye(number)
    return changed


def _shards(found: Cases) -> None:
    for number, (name, (dataset, change, ends)) in enumerate(_SHARDS.items()):
        attack = in_shards(_stored(change), dataset)
        command = ("evaluate", "distill")[number % 2]
        finite = not name.startswith("no label")  # the mean over nothing is none
        found.add(name, command, attack, ends=ends, finite=finite, says="train-00000|validation-00000|cache")


def _stored(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any, str], None]:
    return lambda file, name: write_as(file, name, change(file[name][()]), chunks=file[name].chunks)


_SETTINGS: list[tuple[str, Any, str]] = [
    *(("seq_len", value, "refused") for value in (0, -1, 16, 64, 32.5)),
    *(("sequences_per_shard", value, "refused") for value in (0, -1)),
    *(("sequences_per_shard", value, "either") for value in (1, 15, 17)),
    *(("codec.top_k", value, "refused") for value in (-1, 0, 3, 5, 301)),
    *(("codec.num_samples", value, "refused") for value in (-1, 0, 7, 256)),
    *(("codec.knots", value, "refused") for value in ([1.0], [1.0, 1.5], [NAN, 1.0], [1.5, 1.0, -1.0], [1e308, 1.0])),
    *(("codec.kind", value, "refused") for value in ("dense", "tokens", "exec")),
    *(("codec.vocab_size", value, "refused") for value in (0, -300, 1, 299, 2**70)),
    *(("tokenizer_size", value, "either") for value in (0, -1, 301, 2**70)),
    *(("document_mask", value, "either") for value in ("no", 2)),
    *(("seed", value, "either") for value in (-1, 2**70)),
]
_MANIFEST: list[tuple[str, Any, str]] = [
    *(("splits.train.sequences", value, "refused") for value in (0, -1, 25, 2**63)),
    *(("splits.train.shards.0.sequences", value, "either") for value in (0, -1, 17)),
    *(("splits.train.shards", value, "refused") for value in ([],)),
    *(("temperature_range.min", value, "refused") for value in (NAN, 5.0, "0.5")),
    *(("temperature_range.min", value, "either") for value in (0, -1.0, -1e308)),
    *(("temperature_range.max", value, "refused") for value in (NAN, 0, -4, "4")),
    *(("temperature_range.max", value, "either") for value in (INF, 1e308)),
    *(("format_version", value, "refused") for value in (99, -1, "2", None, [2])),
    *(("bytes_per_token", value, "either") for value in ({}, {"total": NAN}, {"total": "many"})),
    *(("fidelity", value, "either") for value in ({}, {"T=1": {}}, {"sample": None}, {"T=1": {"kl_bucket": "x"}})),
]


def _records(found: Cases) -> None:
    for number, (where, value, ends) in enumerate(_SETTINGS):
        command = ("distill", "evaluate")[number % 2]
        attack = _sealed("settings", where, value)
        found.add(f"{where} = {value!r}", command, attack, ends=ends, says="cache")
    for number, (where, value, ends) in enumerate(_MANIFEST):
        attack, about = _sealed("manifest", where, value), where.startswith(("bytes", "fidelity"))
        if not about:
            found.add(f"{where} = {value!r}", "distill", attack, ends=ends, says="cache")
        if about or number % 3 == 0:  # a table of what a manifest says is no lie, whatever it says
            found.add(f"{where} = {value!r}", ("inspect", "cache"), attack, ends="either", says="cache")


def _sealed(record: str, where: str, value: Any) -> Attack:
    def change(content: dict[str, Any]) -> None:
        put(content, where, value)
        if where == "codec.vocab_size":
            content["vocab_size"] = value

    return changed(record, change)


_PROGRESS: list[tuple[str, Any]] = [
    *(("step", value) for value in (-1, 1e308, 2**70, 4.5, NAN, "4", None, True, [4])),
    *(("sequences", value) for value in (-5, 2**70, 16.5, "16", None)),
    *(("epoch", value) for value in (-1, 2**70, "0")),
    *(("loss", value) for value in ("low", [])),
    *(("lr_factor", value) for value in (NAN, -1.0, 1e308, "1", None)),
    *(("skipped_data", value) for value in ("0", [["a", "b"]], [[NAN, 4]])),
    *(("best_loss", value) for value in ("5", [])),
    *(("best_step", value) for value in ("4", -1)),
    *(("rollbacks", value) for value in (-1, "0")),
    *(("more", value) for value in (1,)),
]
_STATE: list[tuple[str, Any]] = [
    *(("progress", value) for value in (MISSING, [], None)),
    *(("watchers", value) for value in (MISSING, [], {"scale": 5}, {"spikes": {"clean": "x"}})),
    *(("watchers.scale.value", value) for value in (0, NAN, "1")),
    *(("watchers.spikes.clean", value) for value in (["a"], 5, [NAN] * 4)),
    *(("options", value) for value in (MISSING, [], "x")),
    *(("options.optimizer", value) for value in (None, {"lr": "x"})),
    *(("cache", value) for value in (MISSING, 5)),
    *(("student", value) for value in (MISSING, None, {})),
]
_ARCHITECTURE: list[tuple[str, Any]] = [
    *(("model_type", value) for value in (MISSING, 5, "no-such", "../docs", "bert", "clip", [])),
    *(("hidden_size", value) for value in (0, -32, 33, "32", 32.5, None)),
    *(("num_hidden_layers", value) for value in (0, -1, 3, "1")),
    *(("num_attention_heads", value) for value in (0, -4, 3)),
    *(("num_key_value_heads", value) for value in (0, 3, -2)),
    *(("vocab_size", value) for value in (0, -1, 299, "300")),
    *(("hidden_act", value) for value in ("os.system", "", 5)),
    *(("rope_parameters", value) for value in (None, [], {"rope_type": "no-such"}, {"rope_theta": "x"})),
    *(("rms_norm_eps", value) for value in ("x", None)),
    *(("quantization_config", value) for value in ({"quant_method": "bitsandbytes"}, {"quant_method": "no-such"}, 5)),
    *(("text_config", value) for value in (5, {"model_type": "llama"})),
    *(("tie_word_embeddings", value) for value in ("x",)),
    *(("layer_types", value) for value in (["no-such"], 5)),
    *(("architectures", value) for value in (["os.system"], 5)),
    *(("torch_dtype", value) for value in ("os.system", "int8", 5)),
]


def _checkpoints(found: Cases) -> None:
    changes = [*((f"progress.{name}", value) for name, value in _PROGRESS), *_STATE]
    for number, (where, value) in enumerate(changes):
        shown = "missing" if value is MISSING else json.dumps(value)[:40]
        about = where.startswith(("progress", "watchers", "options"))
        # what nobody reads is nobody's matter: a wrong loss is shown and does nothing
        ends = "either" if where in _SHOWN else "refused"
        found.add(f"{where} is {shown}", "resume", in_state(where, value), ends=ends, says=_CHECKPOINT)
        command = "inspect run" if about else "inspect checkpoint"
        if number % 3 == 0:
            found.add(f"{where} is {shown}", command, in_state(where, value), ends="either", says="run|step-00000004")
    for name, value in _ARCHITECTURE:
        shown = "missing" if value is MISSING else json.dumps(value)[:40]
        attack = in_state(f"student.architecture.{name}", value)
        found.add(f"architecture's {name} is {shown}", "export", attack, ends="either", says=_CHECKPOINT)
    hubs = ("flash_attention_2", "kernels-community/flash-attn", "org/name:function")
    for value in (MISSING, *hubs, "os.system", 5, None, "sdpa|eager"):
        shown = "missing" if value is MISSING else json.dumps(value)
        attack = in_state("student.attention", value)
        command = ("export", "evaluate run")[len(shown) % 2]
        found.add(f"attention is {shown}", command, attack, says=_CHECKPOINT)


_CHECKPOINT = "run/checkpoints|step-00000004"
_SHOWN = (
    *("progress.loss", "progress.best_step", "watchers", "watchers.scale.value", "progress.epoch", "progress.tokens"),
)


def _weights(found: Cases) -> None:
    for value in (NAN, INF, 1e38):
        how = {"ends": "either"} if value == 1e38 else {"ends": "refused"}  # what is finite may end well
        told = {**how, "says": ""} if value == 1e38 else how
        teacher, model = (_full(f"{name}/model.safetensors", value) for name in ("teacher", "model"))
        for command in ("build", "online"):
            found.add(f"teacher's weights {value}", command, teacher, **{"says": "teacher", **told})
        own = ("distill", "--student", "model", *words("distill", "--student")[1:])
        found.add(f"student's weights {value}", own, model, **{"says": "student|model", **told})
        found.add(f"model's weights {value}", "model", model, ends="either", finite=False)
        found.add(f"checkpoint's weights {value}", "resume", _full(CHECKPOINT, value, "student."), **how)
        moments = "either" if value == INF else how["ends"]  # steps of 0
        found.add(f"checkpoint's moments {value}", "resume", _full(CHECKPOINT, value, "exp_avg_sq"), ends=moments)
    found.add("checkpoint's moments -1", "resume", _full(CHECKPOINT, -1.0, "exp_avg_sq"))
    found.add("checkpoint's temperature NaN", "resume", _full(CHECKPOINT, NAN, "temperature"), ends="either")
    found.add("checkpoint's weights NaN", "export", _full(CHECKPOINT, NAN, "student."), ends="either")


@curried
def _full(place: Place, name: str, value: float, part: str = "") -> None:
    """Fill every number of the tensors whose names have a part."""
    header, data = header_of(place.path(name))
    content = bytearray(data)
    for tensor, entry in header.items():
        if tensor != "__metadata__" and part in tensor and entry["dtype"] == "F32":
            first, last = entry["data_offsets"]
            content[first:last] = np.full((last - first) // 4, value, np.float32).tobytes()
    write_safetensors(place.path(name), header, bytes(content))
    if name == CHECKPOINT:
        place.seal_run()


def _entry(name: str, position: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record[name].__setitem__(position, value)


_LOGPROBS: dict[str, Callable[[dict[str, Any]], None]] = {
    "token of V": _entry("tokens", 3, V),
    "token of -1": _entry("tokens", 3, -1),
    "token of 2^70": _entry("tokens", 3, 2**70),
    "token of 1.5": _entry("tokens", 3, 1.5),
    "token is true": _entry("tokens", 3, True),
    "token is null": _entry("tokens", 3, None),
    "id of V": _entry("top_ids", 3, [V, 1, 2]),
    "id of -1": _entry("top_ids", 3, [-1, 1, 2]),
    "id of 2^70": _entry("top_ids", 3, [2**70, 1, 2]),
    "id of 1.5": _entry("top_ids", 3, [1.5, 1, 2]),
    "id twice": _entry("top_ids", 3, [1, 1, 2]),
    "ids nested": _entry("top_ids", 3, [[1], [2], [3]]),
    "log p of 0.5": _entry("top_logprobs", 3, [0.5, -1.0, -2.0]),
    "log p NaN": _entry("top_logprobs", 3, [NAN, -1.0, -2.0]),
    "log p infinite": _entry("top_logprobs", 3, [INF, -1.0, -2.0]),
    "log p a text": _entry("top_logprobs", 3, ["-1", "a", "b"]),
    "probabilities above 1": _entry("top_logprobs", 3, [-0.1, -0.1, -0.1]),
    "a list too short": lambda record: record["top_ids"].pop(),
    "entries of one kind alone": _entry("top_logprobs", 3, []),
}


@curried
def _logprobs(place: Place, change: Callable[[dict[str, Any]], None]) -> None:
    path = place.path("logprobs.jsonl")
    first, *rest = path.read_text().splitlines()
    record = json.loads(first)
    change(record)
    path.write_text("\n".join([json.dumps(record), *rest]) + "\n")


_SPEC: list[tuple[str, Any, str]] = [
    *(("vocab_size", value, "refused") for value in (0, -300, 1.5)),
    *(("num_hidden_layers", value, "refused") for value in (0, -1)),
    ("num_key_value_heads", 3, "refused"),
    *(("num_key_value_heads", value, "refused") for value in (0, -2)),
    *(("num_attention_heads", value, "refused") for value in (0, 5, -4)),
    *(("hidden_size", value, "refused") for value in (0, -32, 30)),
    *(("intermediate_size", value, ends) for value, ends in ((0, "either"), (-1, "refused"))),
    *(("max_position_embeddings", value, "either") for value in (0, -1)),
    ("max_position_embeddings", 31, "refused"),
    *(("rms_norm_eps", value, "either") for value in (-1.0, 1e308)),
    *(("hidden_act", value, "refused") for value in ("os.system", "")),
    ("initializer_range", 1e308, "either"),
]
