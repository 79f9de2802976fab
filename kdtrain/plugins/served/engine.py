"""The kinds of inference servers: how the distributions of a prompt are requested of each, in the words of vLLM.

What kdtrain requests and reads is what vLLM's completions have. An engine with another interface translates both ways;
the rest is the same for every engine: retries, checks, the fingerprint, caches. Its name stands in the teacher's TOML,
as `engine` under [options] of `kind = "served"`.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from kdtrain.plugins.served.answers import Choice
from kdtrain.registry import Registry

ENGINES = Registry("the engine", "kdtrain.engines", __name__, {"vllm": "vLLM's completions, the default"})


class Usage(msgspec.Struct):
    """What a request cost."""

    prompt_tokens: int | None = None


class Completion(msgspec.Struct):
    """An answer of /completions; other keys are ignored."""

    model: str
    choices: list[Choice]
    usage: Usage | None = None
    system_fingerprint: str | None = None


class Engine:
    """vLLM's completions; another engine overrides what differs, and is no more trusted than any server."""

    answer: Any = Completion
    """The type that its JSON must have, of msgspec."""

    def url(self, api: str) -> str:
        """Where prompts are posted. api: the server's address, which ends in /v1."""
        return f"{api}/completions"

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return what to post for a request of vLLM's: `prompt` (ids), `prompt_logprobs` (entries per token), ..."""
        return body

    def read(self, answer: Any, body: Mapping[str, Any]) -> Completion:
        """Read an answer of the type `answer`, as vLLM gives it. Wrong: it cannot be that."""
        found: Completion = answer
        return found


Kind = TypeVar("Kind", bound=Callable[[], Engine])


def register_engine(name: str, *, help: str = "") -> Callable[[Kind], Kind]:
    """Make a decorated subclass of `Engine` the one of teachers with `engine = NAME`.

    help: a line about it; by default the first line of the docstring.
    """
    return ENGINES.registers(name, help)


register_engine("vllm")(Engine)
