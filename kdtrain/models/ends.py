"""The tokens that end a text: of a teacher, of a student, and of both.

That a text ends is one event, and models write it with different tokens: a base model with `<|endoftext|>`, the same
model after instruction tuning with `<|im_end|>`, some with either. A student of a teacher's text learns the teacher's
tokens, also that for the end; so it must stop at those, whatever its own settings say.
"""

from typing import Any

from transformers import GenerationConfig

from kdtrain.errors import printable

_SHOWN = 4


def end_tokens(generation: GenerationConfig | None, tokenizer: Any = None) -> tuple[int, ...]:
    """The ids that end a text, ascending, by the generation settings of a model and its tokenizer."""
    stated = getattr(generation, "eos_token_id", None)
    found = set(stated if isinstance(stated, list | tuple) else [stated])
    found.add(getattr(tokenizer, "eos_token_id", None))
    return tuple(sorted(each for each in found if type(each) is int and each >= 0))


def filler_token(tokenizer: Any, ends: tuple[int, ...]) -> int:
    """The id that fills a row behind its text: the one for padding, or the lowest, but none that ends a text."""
    choices = (getattr(tokenizer, "pad_token_id", None), *range(len(ends) + 1))
    return next(each for each in choices if each is not None and each not in ends)


def named(tokens: tuple[int, ...], tokenizer: Any) -> str:
    """Ids with their texts, for a message."""
    shown = [f"{each} ({_text(each, tokenizer)})" for each in tokens[:_SHOWN]]
    more = f" and {len(tokens) - _SHOWN} more" if len(tokens) > _SHOWN else ""
    return f"{', '.join(shown)}{more}"


def _text(token: int, tokenizer: Any) -> str:
    return printable(str(tokenizer.convert_ids_to_tokens(token)))[:40] if token < len(tokenizer) else "no token"


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
