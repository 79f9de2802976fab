"""Options of a teacher that an inference server runs."""

from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from kdtrain.config.commands import CacheTeacherConfig, DistillConfig
from kdtrain.config.sections import CodecConfig
from kdtrain.config.values import Options, flag, option, refuse
from kdtrain.errors import shown_address

KEY = "KDTRAIN_SERVER_KEY"
"""The environment variable of a server's API key. Not OPENAI_API_KEY: that of another service would go to any host."""


def api_url(url: str) -> str:
    """Normalise the address of a server's API, which ends in /v1: equal for two spellings of one."""
    parts = urlsplit(url)
    path = parts.path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc.lower()}{path if path.endswith('/v1') else f'{path}/v1'}"


def _check_servers(urls: tuple[str, ...]) -> None:
    for url in urls:
        refuse("@" in url, f"--teacher-server with an @ in its address: a password would end in logs; use {KEY}")
        try:
            parts = urlsplit(url)
            usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # brackets, or the port
            usable = False
        usable = usable and url.isprintable() and " " not in url
        shown = shown_address(url)
        refuse(not usable, f"--teacher-server {shown} is not an address; give one such as http://HOST:8000/v1")
        refuse(bool(parts.query or parts.fragment), f"--teacher-server {shown}: leave out what follows ? or #")
    refuse(len({*map(api_url, urls)}) < len(urls), "--teacher-server: one address is given twice; name each once")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Options):
    """A teacher that an inference server runs; its API key stands in KDTRAIN_SERVER_KEY."""

    teacher_server: tuple[str, ...] = option(
        (), several=True, shown="URL", free=True, private="sends the text to a server", check=_check_servers, brief=True
    )
    """Address of the teacher's vLLM server; http://HOST:8000/v1, given again for more servers (docs/vllm.md)."""
    server_model: str | None = option(None, free=True, once=True, text=True, needs="teacher_server")
    """The name of the teacher there; by default the only one that is served, or that of --teacher."""
    server_concurrency: int = option(16, free=True, least=1, most=1024, needs="teacher_server")
    """Requests at once, over all servers."""
    server_timeout: float = option(600.0, free=True, above=0, most=86_400, needs="teacher_server")
    """Seconds that an answer may take."""
    server_patience: float = option(600.0, free=True, least=0, most=604_800, needs="teacher_server")
    """Seconds for which a request is repeated, where servers are away or busy, before the command ends."""
    server_tolerance: float | None = option(None, free=True, above=0, most=10, needs="teacher_server")
    """Nats by which a server's answers to the probes may change; by default from what they change by themselves."""

    @property
    def teacher_kind(self) -> str | None:
        """The kind of the teacher; None: no server is named."""
        return "served" if self.teacher_server else None

    def connect(self, teacher: Any, codec: CodecConfig) -> None:
        """Give the teacher the servers' addresses. UsageError: the API key would be sent unencrypted."""
        teacher.connect(self, codec)

    def check(self, config: CacheTeacherConfig) -> None:
        """Raise UsageError for options that have no effect on a server's answers."""
        if not self.teacher_server:
            return
        idle = {
            "--teacher-parallel": config.parallel.teacher_parallel != "auto",
            "--teacher-tensor-parallel": config.parallel.teacher_tensor_parallel > 1,
            "--teacher-weights": config.teacher_weights is not None,
            "--no-compile": not config.compile,
            "--precision": config.precision != "auto" and config.writer is None,  # a student that writes runs here
            "--device": config.device.startswith("cuda") and config.writer is None,
        }
        for name, given in idle.items():
            refuse(given, f"{name} has no effect with --teacher-server: no teacher runs here; leave it out")
        refuse(
            config.refine is not None,
            "--refine asks for another grid of samples, which no server gives; leave --teacher-server out",
        )
        codec = config.codec
        use = "--top-k, or --num-samples where the server has kdtrain's plugin"
        refuse(codec.dense, f"--dense: no server gives whole distributions; leave it out, and use {use}")
        refuse(
            bool(codec.samples and codec.top_k),
            f"--top-k and --num-samples exclude each other with --teacher-server; use either {use}",
        )


@dataclass(frozen=True, kw_only=True)
class RunServerConfig(ServerConfig):
    """A teacher that an inference server runs, for a run: its answers are cached in the run's folder."""

    server_top_k: int = option(64, least=1, needs="teacher_server")
    """The most likely entries that are requested at each position, and cached."""
    server_num_samples: int = option(0, least=0, most=255, needs="teacher_server")
    """Samples of each position instead of --server-top-k, where the server has kdtrain's plugin."""

    @property
    def data_plan(self) -> str | None:
        """The plan of what the servers answer; None: no server is named."""
        return self.teacher_kind

    def check(self, config: DistillConfig) -> None:  # type: ignore[override]
        """Raise UsageError, before requests of hours, for options that a server's answers cannot serve."""
        if not self.teacher_server:
            return
        objective = config.objective
        refuse(
            config.teacher is None, "--teacher-server needs --teacher, for the tokenizer and the name of what it serves"
        )
        refuse(
            config.teacher == "self",
            "--teacher self is the student, which no server runs; leave --teacher-server out",
        )
        refuse(
            config.teacher_weights is not None,
            "--teacher-weights has no effect with --teacher-server: no teacher runs here; leave it out",
        )
        refuse(config.source != "cache", "--teacher-server reads --data itself; leave --source out")
        own = next(config.having("own_text"), None) is not None
        for name in ("server_top_k", "server_num_samples"):
            idle = f"{flag(name)} is for the answers about --data; a round keeps --top-k or --num-samples"
            refuse(own and getattr(self, name) != getattr(type(self)(), name), idle)
        other = objective.temperature != 1 or objective.learns_temperature or objective.schedules_temperature
        refuse(other, "what --teacher-server gives is right at T = 1 only; leave the temperature's options out")
        refuse(
            self.server_num_samples > 0 and self.server_top_k != type(self)().server_top_k,
            "--server-num-samples are instead of --server-top-k; give one",
        )
        refuse(objective.hidden_loss != "none", "--hidden-loss needs a teacher that runs here; leave it out")
        refuse(
            bool(config.cross_tokenizer),
            "--cross-tokenizer needs the whole cache before training; capture the server's answers with cache-teacher, "
            "and give --cache",
        )

    def capture(self, config: DistillConfig, **options: Any) -> CacheTeacherConfig:
        """Configure the capture of the server's answers for a run."""
        assert config.teacher is not None
        samples = self.server_num_samples
        codec = CodecConfig(top_k=0 if samples else self.server_top_k, num_samples=samples or None)
        server = ServerConfig(**{each.name: getattr(self, each.name) for each in fields(ServerConfig)})
        return CacheTeacherConfig(
            teacher=config.teacher, data=config.data, codec=codec, plugins={"server": server}, **options
        )
