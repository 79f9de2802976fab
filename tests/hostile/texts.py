"""JSON and TOML of every shape, in every file that is read as such; chat templates; text, jsonl and parquet."""

import json
from collections.abc import Iterator
from typing import Any

from tests.hostile import seal
from tests.hostile.case import (
    COMMANDS,
    MISSING,
    Cases,
    Many,
    Place,
    curried,
    in_cache,
    in_json,
    in_sealed,
    spec_with,
    words,
    wrote,
)

DEEP = 100_000
JSON: dict[str, bytes] = {
    "not JSON": b"this is not JSON\n",
    "empty": b"",
    "cut off": b'{"format_version": 2, "codec": {"dr',
    "a list": b"[]",
    "a text": b'"text"',
    "a number": b"5",
    "null": b"null",
    "an empty object": b"{}",
    "lists nested deep": b"[" * DEEP + b"]" * DEEP,
    "objects nested deep": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "lists open deep": b"[" * 10**6,
    "NaN": b"NaN",
    "a number of a million digits": b'{"a": ' + b"9" * 10**6 + b"}",
    "exponent of a million": b'{"a": 1e1000000}',
    "with a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "lone surrogates": b'{"\\ud800": "\\udfff"}',
    "zero bytes": b"\0" * 100,
    "one key twice": b'{"a": 1, "a": 2}',
    "escapes": b'{"\\u001b[2J\\u0007": "\\n\\n\\r"}',
}
_CACHE = ("manifest.json", "settings.json", "shards/train-00000.json")
_NEWEST = "run/checkpoints/step-00000004"
_WRONG: tuple[Any, ...] = (None, 5, -1, "text", [], {}, [[1]], {"a": {}}, True, 1e308)


def cases() -> Cases:
    """List cases of files of caches, runs, checkpoints and models, of specs and options, of templates and of data."""
    found = Cases("json-toml")
    _caches(found)
    _runs(found)
    _models(found)
    _tomls(found)
    _specs(found)
    _templates(found)
    _data(found)
    return found


def _some(number: int, step: int) -> Iterator[tuple[str, bytes]]:
    """Yield every `step`-th shape, another choice for each file."""
    yield from list(JSON.items())[number % step :: step]


def _caches(found: Cases) -> None:
    for number, name in enumerate(_CACHE):
        for kind, content in _some(number, 2):
            found.add(f"{name}: {kind}", "verify", wrote(f"cache/{name}", content), resealed=False, says="cache")
        for kind, content in _some(number, 5):
            found.add(f"{name}: {kind}", "repair", wrote(f"cache/{name}", content), resealed=False, says="cache")
    for kind, content in _some(1, 2):
        attack = wrote("cache/manifest.json", content)
        found.add(f"manifest.json: {kind}", "distill", attack, resealed=False, says="cache")
    for kind, content in _some(1, 3):
        attack = wrote("unfinished/settings.json", content)
        found.add(f"unfinished, settings.json: {kind}", "finish", attack, resealed=False, says="unfinished")
        attack = wrote("unfinished/shards/train-00000.json", content)
        found.add(f"unfinished, sidecar: {kind}", "finish", attack, resealed=False, ends="either")
    for number, where in enumerate(_KEYS):
        for offset, command in enumerate(("distill", ("verify", "inspect")[number % 2])):
            value = _WRONG[(3 * number + offset) % len(_WRONG)]
            attack = in_cache("manifest", where, value)
            shown = json.dumps(value)
            ends = "either" if where in _SHOWN or command != "distill" else "refused"
            found.add(f"manifest's {where} is {shown}", command, attack, ends=ends, resealed=False, says="cache")
        if number % 3 == 0:
            attack = in_cache("manifest", where, MISSING)
            ends = "either" if where in _SHOWN else "refused"
            found.add(f"manifest without {where}", "distill", attack, ends=ends, resealed=False, says="cache")
    keys = ("name", "sequences", "first_sequence", "stored", "broken", "rows_sha256", "bytes", "sha256")
    for number, where in enumerate(keys):
        wrong, other = _WRONG[number], _WRONG[(number + 4) % len(_WRONG)]
        attack = in_cache("sidecar", where, wrong)
        found.add(f"sidecar's {where} is {json.dumps(wrong)}", "repair", attack, ends="either", resealed=False)
        shown = f"unfinished, sidecar's {where} is {json.dumps(other)}"
        found.add(shown, "finish", in_sealed("unfinished/shards/train-00000.json", where, other), ends="either")


_SHOWN = (
    *("data", "versions", "fidelity", "bytes_per_token", "teacher", "tokenizer_digest", "tokenizer_files"),
    *("index_sha256", "seed", "sequences", "document_mask", "tokenizer_size", "vocab_size"),
)
_KEYS = (
    *("codec", "data", "seq_len", "sequences", "sequences_per_shard", "teacher", "tokenizer_digest", "tokenizer_size"),
    *(f"splits{each}" for each in ("", ".train", ".train.shards", ".train.shards.0", ".train.shards.0.name")),
    *("splits.train.shards.0.bytes", "splits.train.shards.0.sha256", "temperature_range", "tokenizer_files"),
    *("index_sha256", "versions", "fidelity", "bytes_per_token", "document_mask", "seed", "vocab_size"),
)


def _runs(found: Cases) -> None:
    for number, name in enumerate(("state.json", "manifest.json")):
        rows = (
            ("resume", "either", _some(number, 1 + number)),
            ("inspect run", "either", _some(number, 4)),
            ("export", "refused", _some(2 + number, 4)),
        )
        for command, ends, some in rows:
            for kind, content in some:
                attack, shown = _in_checkpoint(name, content), f"{name} of a checkpoint: {kind}"
                found.add(shown, command, attack, ends=ends, resealed=False, says="step|run")
    for number, name in enumerate(("environment.json", "student/kdtrain.json", "metrics.jsonl", "events.jsonl")):
        for position, (kind, content) in enumerate(_some(number, 3)):
            command = ("inspect run", "resume")[(number + position) % 2]
            found.add(f"{name}: {kind}", command, wrote(f"run/{name}", content), ends="either")
    for kind, line in _LINES.items():
        for name in ("metrics.jsonl", "events.jsonl"):
            found.add(f"{name} with {kind}", "resume", _appended(f"run/{name}", line), ends="works")


_LINES = {
    "a cut line": b'{"step": 3, "los',
    "bytes that are not UTF-8": b'{"step": 3, "a": "\xff\xfe"}\n',
    "a line that is a list": b"[1, 2]\n",
    "a line without a step": b'{"loss": 3}\n',
    "a step that is a text": b'{"step": "three"}\n',
    "a line nested deep": b"[" * DEEP + b"\n",
    "zero bytes": b"\0" * 4096,
    "a step of 1e400": b'{"step": 1e400, "loss": NaN}\n',
}


@curried
def _appended(place: Place, name: str, line: bytes) -> None:
    path = place.path(name)
    path.write_bytes(path.read_bytes() + line)


@curried
def _in_checkpoint(place: Place, name: str, content: bytes) -> None:
    place.write(f"{_NEWEST}/{name}", content)
    if name == "state.json":
        place.seal_run()


def _models(found: Cases) -> None:
    for kind, content in JSON.items():
        found.add(f"config.json: {kind}", "model", wrote("model/config.json", content), says="model")
    for kind, content in _some(1, 2):
        found.add(f"tokenizer.json: {kind}", "build", wrote("teacher/tokenizer.json", content), says="teacher")
    for kind, content in _some(0, 4):
        attack = _cache_tokenizer(content)
        found.add(f"the cache's tokenizer.json: {kind}", "distill", attack, ends="either", says="cache|tokenizer")
    optional = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.json")
    for number, name in enumerate(optional):
        for kind, content in _some(number, 4):
            attack = wrote(f"teacher/{name}", content)
            found.add(f"teacher's {name}: {kind}", "build", attack, ends="either", says="teacher")
    for kind, content in _some(1, 3):
        found.add(f"weights' index: {kind}", "model", _without_weights(content), says="model")
    for where, value in _TOKENIZER:
        attack = in_json("teacher/tokenizer.json", where, value)
        found.add(f"tokenizer's {where} is {_shown(value)}", "build", attack, ends="either")
    for name, where, value in _MODEL_CONFIG:
        attack = in_json(f"model/{name}", where, value)
        found.add(f"model's {name}: {where} is {_shown(value)}", "model", attack, says="model|tensor")
    for where, value in _TOKENIZER_CONFIG:
        attack = in_json("teacher/tokenizer_config.json", where, value)
        found.add(f"tokenizer_config's {where} is {_shown(value)}", "build", attack, ends="either")


def _shown(value: Any) -> str:
    """Return how a value begins."""
    return json.dumps(value.make(99) if isinstance(value, Many) else value)[:40]


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


_BYTES = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def _special(number: int, content: str) -> dict[str, Any]:
    return {"id": number, "content": content, "special": True} | _FLAGS


def _processed(number: int) -> dict[str, Any]:
    return {"id": f"<{number}>", "ids": [number], "tokens": [f"<{number}>"]}


_TOKENIZER: list[tuple[str, Any]] = [
    *(("model", value) for value in (None, [], {"type": "no-such"}, {"type": "BPE", "vocab": {}, "merges": []})),
    *(("model.vocab", value) for value in ({"a": -1}, {"a": 2**70}, {"a": "0"}, [])),
    *(("model.merges", value) for value in ("a b", [["a"]], [5], ["no such merge"])),
    *(("added_tokens", value) for value in (5, [{"id": 2**31, "content": "x"}], [{"id": "a"}], [{"content": "x"}])),
    *(("pre_tokenizer", value) for value in ({"type": "no-such"}, 5)),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": "(("}, "content": ""}),
    ("normalizer", {"type": "Sequence", "normalizers": [_replace("a", "aa")] * 40}),
    ("normalizer", _replace("a", "a" * 10_000)),
    ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"} | _BYTES] * 40}),
    ("added_tokens", Many(lambda many: [_special(300 + n, f"<{n}>") for n in range(many)], 300_000)),
    ("added_tokens", Many(lambda many: [_special(300, "x" * many)], 2**23)),
    ("model.vocab", {"a": 2**32 - 2}),
    ("post_processor.special_tokens", Many(lambda many: {f"<{n}>": _processed(n) for n in range(many)}, 10**5)),
    ("truncation", {"direction": "Right", "max_length": -1, "strategy": "LongestFirst", "stride": 0}),
]
_MODEL_CONFIG: list[tuple[str, str, Any]] = [
    ("config.json", "eos_token_id", Many(lambda many: list(range(many)), 10**6)),
    ("config.json", "head_dim", 3),
    ("generation_config.json", "bad_words_ids", Many(lambda many: [[1]] * many, 10**6)),
]
_TOKENIZER_CONFIG: list[tuple[str, Any]] = [
    *(("tokenizer_class", value) for value in ("no-such", 5, "os.system", "LlamaTokenizer")),
    *(("eos_token", value) for value in (5, {"content": 5}, [])),
    *(("model_max_length", value) for value in ("x", -1, 1e400)),
    *(("chat_template", value) for value in (5, [], {"a": "b"}, [{"name": "default"}])),
    *(("added_tokens_decoder", value) for value in (5, {"x": {}}, {"-1": {"content": "a"}})),
    ("extra_special_tokens", Many(lambda many: [f"<{n}>" for n in range(many)], 100_000)),
    ("additional_special_tokens", Many(lambda many: [f"<{n}>" for n in range(many)], 100_000)),
]


@curried
def _cache_tokenizer(place: Place, content: bytes) -> None:
    place.write("cache/tokenizer/tokenizer.json", content)
    seal.cache(place.path("cache"))


@curried
def _without_weights(place: Place, content: bytes) -> None:
    place.path("model/model.safetensors").unlink()
    place.write("model/model.safetensors.index.json", content)


TOML: dict[str, str] = {
    "not TOML": "this is not TOML",
    "lists nested deep": "a = " + "[" * 20_000 + "]" * 20_000,
    "tables nested deep": "a = " + "{a = " * 20_000 + "1" + "}" * 20_000,
    "a key of many parts": ".".join(["a"] * 20_000) + " = 1",
    "a section of many parts": "[" + ".".join(["a"] * 20_000) + "]",
    "a text that is open": "a = '''" + "x" * 1000,
    "a number of many digits": "steps = " + "9" * 100_000,
    "one key twice": "a = 1\na = 2",
    "escapes": 'a = "\\u001b[2J\\n\\r\\u0000"\n"\\u001b[2J" = 1',
    "a lone surrogate": 'a = "\\ud800"',
    "zero bytes": "\0\0\0",
    "not UTF-8": "a = '\udcff\udcfe'",
    "a key of 5,000 characters": "a" * 5_000 + " = 1",
    "with a byte order mark": "\ufeffa = 1",
    "a date": "a = 1979-05-27",
    "10,000 keys": "\n".join(f"a{n} = {n}" for n in range(10_000)),
}


def _tomls(found: Cases) -> None:
    with_config = (*words("distill", "--steps"), "--config", "options.toml")  # a flag would win over the file
    for kind, text in TOML.items():
        found.add(f"student.toml: {kind}", "distill", wrote("student.toml", text), says="student.toml")
        found.add(f"--config: {kind}", with_config, wrote("options.toml", text), says="options.toml")
        found.add(f"run/config.toml: {kind}", "resume", wrote("run/config.toml", text), ends="either", says="run")
        other = ("inspect run", "export")[len(kind) % 2]
        found.add(f"run/config.toml: {kind}", other, wrote("run/config.toml", text), ends="either", says="run")
    for where, text in _OPTIONS.items():
        found.add(f"--config {where}", with_config, wrote("options.toml", text), says="options.toml|--")
    for where, text in _RUN_CONFIGS.items():
        command, attack = ("evaluate run", "export")[len(where) % 2], wrote("run/config.toml", text)
        found.add(f"run/config.toml: {where}", command, attack, ends="either", says="run|cache")


_OPTIONS = {
    "steps is a date": "[run]\nsteps = 1979-05-27",
    "steps is NaN": "[run]\nsteps = nan",
    "steps of 70 bits": "[run]\nsteps = 9223372036854775807",
    "lr is infinite": "[optimizer]\nlr = inf",
    "betas of one": "[optimizer]\nbetas = [0.9]",
    "betas of texts": "[optimizer]\nbetas = ['a', 'b']",
    "seed is a list": "[run]\nseed = [[1]]",
    "section is a list": "[[run]]\nsteps = 1",
    "section is a number": "run = 5",
    "a table in a section": "[run.steps]\na = 1",
    "zero byte in a path": '[data]\ntext_column = "a\\u0000b"',
    "a flag as a value": "[run]\nseed = '--json'",
    "config within": "[run]\nconfig = 'options.toml'",
    "device of 5,000 characters": f"[run]\ndevice = '{'a' * 5_000}'",
    "help as a value": "[run]\nstudent = '--help'",
}
_RUN_CONFIGS = {
    "cache is a number": "[run]\nstudent = 'a'\nout = 'b'\ncache = 5\n",
    "cache is a list": "[run]\nstudent = 'a'\nout = 'b'\ncache = ['x']\n",
    "cache is the user's": "[run]\nstudent = 'a'\nout = 'b'\ncache = '../docs'\n",
    "cache has a zero byte": '[run]\nstudent = "a"\nout = "b"\ncache = "a\\u0000b"\n',
    "cache of 5,000 characters": f"[run]\nstudent = 'a'\nout = 'b'\ncache = '{'a' * 5_000}'\n",
    "run is a list": "run = ['student', 'out']\n",
    "run is a text": "run = 'student, out'\n",
}


def _specs(found: Cases) -> None:
    layers = "init = 'teacher-layers'\nlayers = [0]\n[config]\nmodel_type = 'llama'\n"
    itself = wrote("student.toml", f"teacher = 'student.toml'\n{layers}")
    found.add("spec that is its own teacher", "distill", itself, says="student")
    found.add("two specs, each the other's teacher", "distill", _two_specs(layers), says="student|other")
    found.add("a chain of 2,000 specs", "distill", _chain(layers), says="student|spec")
    build = ("cache-teacher", "--teacher", "student.toml", *COMMANDS["build"][3:])
    found.add("teacher that is a cycle", build, itself, says="student")
    for line in _SPEC_LINES:
        found.add(
            f"spec with {line[:60]}", "distill", spec_with(line, config=not line.startswith("config =")), says="student"
        )


_SPEC_LINES = (
    *("source = 5", "source = ['a']", "config = 5", "config = []", "config = 'llama'", "tokenizer = 5"),
    *("tokenizer = []", "layers = ['a']", "layers = [[1]]", "layers = 5", "dtype = 5", "dtype = 'os'", "init = 5"),
    *("attention = 'kernels-community/x'", "attention = 5", "name = 5", "revision = 5", "trust_remote_code = 'no'"),
    *("trust_remote_code = 1", "teacher = {}"),
)


@curried
def _two_specs(place: Place, layers: str) -> None:
    place.write("student.toml", f"teacher = 'other.toml'\n{layers}")
    place.write("other.toml", f"teacher = 'student.toml'\n{layers}")


@curried
def _chain(place: Place, layers: str) -> None:
    place.write("student.toml", f"teacher = 'spec-0.toml'\n{layers}")
    for number in range(2_000):
        place.write(f"spec-{number}.toml", f"teacher = 'spec-{number + 1}.toml'\n{layers}")


_TEMPLATES = {
    "nested loops": "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3,
    "a long loop that prints": "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "a text times 10^10": "{{ 'a' * 10000000000 }}",
    "a text times 10^8": "{{ ('a' * 100000000) | length }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a macro that doubles": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "Python's classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "Python's globals": "{{ cycler.__init__.__globals__.os.system('touch pwned') }}",
    "open brackets": "{{ ((((",
    "an error of its own": "{{ raise_exception('\\u001b[2J\\nTraceback (most recent call last)') }}",
    "a format": "{{ '{0.__class__}'.format(1) }}{{ '%9999999999d' % 1 }}",
    "an include": "{% include '/etc/passwd' %}",
    "expressions nested deep": "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "blocks nested deep": "{% if 1 %}" * 2_000 + "{% endif %}" * 2_000,
    "a sum over everything": "{% for a in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "no word": "",
}


def _templates(found: Cases) -> None:
    for kind, template in _TEMPLATES.items():
        says = "template|teacher|chat|conversation"
        found.add(f"chat template: {kind}", "chat", _template(template), ends="either", says=says)


@curried
def _template(place: Place, text: str) -> None:
    with place.json("teacher/tokenizer_config.json") as config:
        config.pop("chat_template", None)
    place.write("teacher/chat_template.jinja", text)


_ROWS: dict[str, bytes] = {
    "text is a number": b'{"text": 5}\n',
    "text is null": b'{"text": null}\n',
    "text is a list": b'{"text": ["a"]}\n',
    "lists nested deep": b"[" * DEEP + b"\n",
    "objects nested deep": b'{"text": ' * DEEP + b"\n",
    "not JSON": b"text\n",
    "not UTF-8": b'{"text": "\xff\xfe"}\n',
    "zero bytes": b"\0" * 5000,
    "a lone surrogate": b'{"text": "\\ud800 abc"}\n',
    "10,000 columns": json.dumps({f"c{n}": n for n in range(10_000)}).encode() + b"\n",
    "a number of many digits": b'{"text": ' + b"9" * 10**5 + b"}\n",
    "types that change": b'{"text": "a"}\n{"text": {"a": 1}}\n' * 20,
}
_TURNS: dict[str, Any] = {
    "messages is a text": "hello",
    "messages of texts": ["hello"],
    "role is a number": [{"role": 5, "content": "x"}],
    "role is a list": [{"role": ["assistant"], "content": "x"}],
    "content is an object": [{"role": "assistant", "content": {"a": 1}}],
    "no assistant": [{"role": "user", "content": "x"}],
    "zero byte in it": [{"role": "assistant", "content": "a\0b"}],
    "special tokens in it": [{"role": "assistant", "content": "<|endoftext|>" * 20}],
}
_RECORDS: dict[str, bytes] = {
    "a list": b"[]\n",
    "lists nested deep": b"[" * DEEP + b"\n",
    "tokens nested deep": b'{"tokens": ' + b"[" * DEEP + b"]" * DEEP + b"}\n",
    "not UTF-8": b'{"tokens": "\xff"}\n',
    "a number of many digits": b'{"tokens": [' + b"9" * 10**5 + b"]}\n",
    "nothing but lines": b"\n" * 1000,
    "zero bytes": b"\0" * 1000,
}


def _data(found: Cases) -> None:
    rows = ("cache-teacher", "--teacher", "teacher", "--data", "chat.jsonl", *COMMANDS["build"][5:])
    for kind, content in _ROWS.items():
        found.add(f"jsonl: {kind}", rows, wrote("chat.jsonl", content * 3), ends="either", says="chat.jsonl")
    for kind, turns in _TURNS.items():
        line = json.dumps({"messages": turns}).encode() + b"\n"
        found.add(f"conversations: {kind}", "chat", wrote("chat.jsonl", line * 40), ends="either", says="chat.jsonl")
    for kind, content in _RECORDS.items():
        attack = _appended("logprobs.jsonl", content)
        found.add(f"log-probabilities: {kind}", "logprobs", attack, ends="either", says="logprobs.jsonl")
    parquet = ("cache-teacher", "--teacher", "teacher", "--data", "data.parquet", *COMMANDS["build"][5:])
    footer = b"PAR1" + b"\xff\xff\xff\x7fPAR1"
    for kind, content in (("empty", b"PAR1PAR1"), ("a footer of 2 GB", footer), ("noise", bytes(range(256)) * 40)):
        found.add(f"parquet: {kind}", parquet, wrote("data.parquet", content), says="data.parquet")
    for kind, content in {
        "zero bytes": b"\0" * 9_000,
        "not UTF-8": b"\xff" * 9_000,
        "one word": b"a" * 50_000,
        "blank": b" \n" * 9_000,
    }.items():
        found.add(f"text: {kind}", "build", wrote("corpus/a.txt", content), ends="either", says="corpus")
