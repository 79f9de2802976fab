"""`kdtrain completion SHELL`: a script that lets bash, zsh or fish complete commands, options and their values.

The script is made from the options of the built-in commands and of those that installed packages add, and needs no
Python while you type; make it again after an update.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress

from kdtrain.config import choices
from kdtrain.config.commands import CompletionConfig
from kdtrain.config.kinds import choices as words_of
from kdtrain.config.options import options_of
from kdtrain.config.registered import COMMANDS
from kdtrain.config.values import flag
from kdtrain.errors import UsageError
from kdtrain.models.spec import shipped
from kdtrain.registry import Registry


def main(config: CompletionConfig) -> int:
    """Print the script."""
    print(SCRIPTS[config.shell](), end="")
    return 0


def commands() -> dict[str, type]:
    """The configuration of each command, those of installed packages included, but for a package that fails to load."""
    found: dict[str, type] = {}
    for name in COMMANDS.help():
        with suppress(UsageError):
            found[name] = COMMANDS.get(name).config
    return found


def flags(kind: type) -> Iterator[tuple[str, list[str] | None]]:
    """The flags of a command, each with the words that it takes: none for a switch; None: a file or a free text."""
    names = {each.option: list(each.help()) for each in vars(choices).values() if isinstance(each, Registry)}
    names |= {"--teacher": list(shipped("teachers")), "--student": list(shipped("students"))}
    for option in options_of(kind).values():
        if option.positional:
            continue
        if option.switch:
            yield from ((option.flag, []), (flag(f"no_{option.name}"), []))
        else:
            yield option.flag, words_of(option.kind) or names.get(option.flag)
    yield "--help", []


def positional(kind: type) -> list[str]:
    """The words that may stand without a flag; none where that is a path."""
    return [word for option in options_of(kind).values() if option.positional for word in words_of(option.kind)]


def bash() -> str:
    """For bash: `source` it, or put it into a folder that bash-completion reads."""
    known, cases, values = commands(), [], []
    for command, kind in known.items():
        found = dict(flags(kind))
        cases.append(f'    {command}) flags="{" ".join(found)}" words="{" ".join(positional(kind))}" ;;')
        values += [f'    "{command} {name}") words="{" ".join(each)}" ;;' for name, each in found.items() if each]
    return f"""# kdtrain completion bash
_kdtrain() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
  local flags="" words=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(known)} --help --version" -- "$current"))
    return
  fi
  case "$command" in
{chr(10).join(cases)}
  esac
  case "$command $before" in
{chr(10).join(values)}
  esac
  if [ "${{current#-}}" != "$current" ]; then
    COMPREPLY=($(compgen -W "$flags" -- "$current"))
  else
    COMPREPLY=($(compgen -W "$words" -- "$current"))  # without a match: files
  fi
}}
complete -o default -F _kdtrain kdtrain
"""


def zsh() -> str:
    """For zsh, which runs the functions of bash."""
    return f"autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n{bash()}"


def fish() -> str:
    """For fish: put it into ~/.config/fish/completions/kdtrain.fish."""
    lines = ["# kdtrain completion fish"]
    for command, kind in commands().items():
        text = COMMANDS.help()[command].replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c kdtrain -f -n __fish_use_subcommand -a {command} -d '{text}'")
        seen = f"-n '__fish_seen_subcommand_from {command}'"
        if words := positional(kind):
            lines.append(f"complete -c kdtrain -f {seen} -a '{' '.join(words)}'")
        for name, each in flags(kind):
            takes = "" if each == [] else " -r -F" if each is None else f" -r -a '{' '.join(each)}'"
            lines.append(f"complete -c kdtrain {seen} -l {name.removeprefix('--')}{takes}")
    return "\n".join(lines) + "\n"


SCRIPTS: dict[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
