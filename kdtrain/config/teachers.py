"""Options of a teacher that writes text, and of one that an inference server runs."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from kdtrain.config.values import Options, option, refuse
from kdtrain.errors import shown_address

DEFAULT_PROMPT = 64
"""Tokens of a prompt, where nothing else is asked for, or half of a sequence where that is less."""

KEY = "KDTRAIN_SERVER_KEY"
"""The environment variable of a server's API key. Not OPENAI_API_KEY: that of another service would go to any host."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(Options):
    """Text that the teacher writes: it continues prompts of the data, and is cached with what it says of them."""

    generate: bool = option(False, brief="Let the teacher continue the text, and cache that.")
    """Let the teacher continue prompts of the data, and cache what it writes with its distributions, in one pass."""
    prompt_tokens: int | None = option(None, least=1, needs="generate")
    """First tokens of plain text that are its prompt; by default 64, or half of --seq-len where that is less."""
    max_new_tokens: int | None = option(None, least=1, needs="generate")
    """Tokens that the teacher writes at most; by default as many as fit into a sequence behind its prompt."""
    gen_temperature: float = option(1.0, least=0, most=100, needs="generate")
    """The temperature at which it writes; 0 always takes the most likely token."""
    gen_top_p: float = option(1.0, above=0, most=1, needs="generate")
    """Draw from the most likely tokens that have this probability together, and never from the others."""


def api_url(url: str) -> str:
    """The address of a server's API, which ends in /v1: equal for two spellings of one."""
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
        usable, shown = usable and url.isprintable() and " " not in url, shown_address(url)
        refuse(not usable, f"--teacher-server {shown} is not an address; give one such as http://HOST:8000/v1")
        refuse(bool(parts.query or parts.fragment), f"--teacher-server {shown}: leave out what follows ? or #")
    refuse(len({*map(api_url, urls)}) < len(urls), "--teacher-server: one address is given twice; name each once")


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Options):
    """A teacher that an inference server runs; its API key stands in KDTRAIN_SERVER_KEY."""

    teacher_server: tuple[str, ...] = option(
        (),
        several=True,
        shown="URL",
        free=True,
        private="sends the text to a server",
        check=_check_servers,
        brief="Where --teacher is served: http://HOST:8000/v1.",
    )
    """Address of a vLLM server of the teacher, http://HOST:8000/v1; again: more servers of it (docs/teachers.md)."""
    server_model: str | None = option(None, free=True, once=True, text=True, needs="teacher_server")
    """The name of the teacher there; by default the only one that is served, or that of --teacher."""
    server_concurrency: int = option(16, free=True, least=1, most=1024, needs="teacher_server")
    """Requests at once, over all servers."""
    server_timeout: float = option(600.0, free=True, above=0, most=86_400, needs="teacher_server")
    """Seconds that an answer may take."""
    server_patience: float = option(600.0, free=True, least=0, most=604_800, needs="teacher_server")
    """Seconds for which a sequence is asked for again, where servers are away or busy, before the command ends."""
    server_tolerance: float | None = option(None, free=True, above=0, most=10, needs="teacher_server")
    """Nats by which a server's answers to the probes may change; by default from what they change by themselves."""


@dataclass(frozen=True, kw_only=True)
class RunServerConfig(ServerConfig):
    """A teacher that an inference server runs, for a run: what it says is cached in the run's folder first."""

    server_top_k: int = option(64, least=1, needs="teacher_server")
    """The most likely entries that are asked for at each position, and cached."""
    server_num_samples: int = option(0, least=0, most=255, needs="teacher_server")
    """Samples of each position instead of --server-top-k, where the server has kdtrain's plugin."""
