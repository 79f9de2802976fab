"""`kdtrain completion SHELL`: a script that lets bash, zsh or fish complete commands, options and their values.

The script is made from the options of the built-in commands and needs no Python while you type; make it again after an
update.
"""

from collections.abc import Callable, Iterator
from typing import Any

from kdtrain.config import choices
from kdtrain.config.commands import COMMANDS, CompletionConfig
from kdtrain.config.kinds import choices as words_of
from kdtrain.config.values import fields_of, flag
from kdtrain.models.spec import shipped
from kdtrain.registry import Registry, first_line


def main(config: CompletionConfig) -> int:
    """Print the script."""
    print(SCRIPTS[config.shell](), end="")
    return 0


def options_of(command: str) -> Iterator[tuple[str, list[str] | None]]:
    """The flags of a command, each with the words that it takes: none for a switch; None: a file or a free text."""
    names = {each.option: list(each.help()) for each in vars(choices).values() if isinstance(each, Registry)}
    names |= {"--teacher": list(shipped("teachers")), "--student": list(shipped("students"))}
    kind: Any = COMMANDS[command]
    for _, each in fields_of(kind):
        if each.metadata.get("positional"):
            continue
        name, words = flag(each.name), words_of(each.type)
        if each.type is bool:
            yield from ((name, []), (flag(f"no_{each.name}"), []))
        else:
            yield name, words or names.get(name)
    yield "--help", []


def positional(command: str) -> list[str]:
    """The words that may stand without a flag; none where that is a path."""
    kind: Any = COMMANDS[command]
    return [word for _, each in fields_of(kind) if each.metadata.get("positional") for word in words_of(each.type)]


def bash() -> str:
    """For bash: `source` it, or put it into a folder that bash-completion reads."""
    commands = " ".join(COMMANDS)
    flags, values = [], []
    for command in COMMANDS:
        found = dict(options_of(command))
        flags.append(f'    {command}) flags="{" ".join(found)}" words="{" ".join(positional(command))}" ;;')
        values += [f'    "{command} {name}") words="{" ".join(each)}" ;;' for name, each in found.items() if each]
    return f"""# kdtrain completion bash
_kdtrain() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
  local flags="" words=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands} --help --version" -- "$current"))
    return
  fi
  case "$command" in
{chr(10).join(flags)}
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
    for command, kind in COMMANDS.items():
        text = first_line(kind).replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c kdtrain -f -n __fish_use_subcommand -a {command} -d '{text}'")
        seen = f"-n '__fish_seen_subcommand_from {command}'"
        if words := positional(command):
            lines.append(f"complete -c kdtrain -f {seen} -a '{' '.join(words)}'")
        for name, each in options_of(command):
            takes = "" if each == [] else " -r -F" if each is None else f" -r -a '{' '.join(each)}'"
            lines.append(f"complete -c kdtrain {seen} -l {name.removeprefix('--')}{takes}")
    return "\n".join(lines) + "\n"


SCRIPTS: dict[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
