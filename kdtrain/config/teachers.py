"""Options of a teacher that writes text."""

from dataclasses import dataclass

from kdtrain.config.values import Options, option

DEFAULT_PROMPT = 64
"""Tokens of a prompt, by default, or half of a sequence where that is less."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(Options):
    """Text that the teacher writes: it continues prompts of the data, and is cached with its distributions."""

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
