"""Captures from a stand-in server (tests/stand_in.py) with the shipped teacher behind it."""

import json
from pathlib import Path

import kdtrain as kd
from kdtrain.config.sections import CodecConfig, DataConfig, TextConfig
from kdtrain.plugins.served.options import ServerConfig
from tests.stand_in import StandIn

PREFLIGHT = 25
"""More requests for completions than the preflight makes."""


def write_text(path: Path) -> None:
    source = Path(json.__file__).with_name("decoder.py").read_text()
    path.write_text(source[:3500])


def capture(server: StandIn | str | list[str], out: str = "cache", top_k: int = 16, **options) -> kd.Cache:
    """Make a small cache of a server's answers."""
    urls = server.url if isinstance(server, StandIn) else server
    given = {"server_patience": 5.0, **{name: options.pop(name) for name in [*options] if name.startswith("server_")}}
    data = {"data": "text.txt", "seq_len": 24, "num_sequences": 10, "validation_sequences": 3, "num_workers": 0}
    data |= {name: options.pop(name) for name in [*options] if name in DataConfig.__dataclass_fields__}
    config = kd.CacheTeacherConfig(
        teacher=options.pop("teacher", "stdlib-5m"),
        out=out,
        data=DataConfig(**data),
        codec=CodecConfig(top_k=top_k, num_samples=options.pop("num_samples", None)),
        plugins={"server": ServerConfig(teacher_server=urls, **given)},
        sequences_per_shard=4,
        batch_size=4,
        **options,
    )
    return kd.cache_teacher(config)


def rows(server: StandIn) -> list[dict]:
    """Return the requests that were about rows of text."""
    return [body for body in server.bodies if body["prompt_logprobs"] == 16 and len(body["prompt"]) <= 25]


def content(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def begun(server: StandIn) -> None:
    """Make a capture that was stopped after its first shard."""
    capture(server)
    for path in [Path("cache/manifest.json"), *Path("cache/shards").glob("train-0000[12].*")]:
        path.unlink()


WRITES = {"text": TextConfig(generate=True, prompt_tokens=6, max_new_tokens=9)}


def samples_of(server, out="cache", number=50, **options) -> kd.Cache:
    return capture(server, out, top_k=0, num_samples=number, **options)
