"""The options of training across tokenizers."""

from typing import Any

from kdtrain.config.values import Conflicts, refuse


def _check_pairs(pairs: tuple[str, ...]) -> None:
    for number, each in enumerate(pairs):
        refuse(
            each.find("=") < 1,
            f"--special-tokens '{each[:80]}' is not TEACHER'S=STUDENT'S; leave the second out, "
            "as '<pad>=', for a token that is dropped",
        )
        token = each.partition("=")[0]
        refuse(token in partners(pairs[:number]), f"--special-tokens gives '{token[:80]}' twice; give it one partner")


SPECIAL_TOKENS: dict[str, Any] = {
    **{"several": True, "later": True, "needs": "cross_tokenizer"},
    **{"check": _check_pairs, "shown": "A=B"},
}
"""Attributes of the option `special_tokens`."""


def partners(pairs: tuple[str, ...]) -> dict[str, str]:
    """The student's special token for each of the teacher's that `--special-tokens` names; empty: it is left out."""
    return {one: other for one, _, other in (each.partition("=") for each in pairs)}


def conflicts_across(across: bool, one_text: bool, hidden_loss: str) -> Conflicts:
    """The conflicts of a run across tokenizers: it reads one cache or packed text, and compares no hidden states."""
    several = "--cross-tokenizer reads one cache; give one --cache (or --teacher with --data), without --source"
    yield across and not one_text, several
    states = f"--hidden-loss {hidden_loss} compares states token by token, which --cross-tokenizer cannot"
    yield across and hidden_loss != "none", f"{states}; leave one of them out"
