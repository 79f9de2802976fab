"""`kdtrain completion SHELL`: a script that lets bash, zsh or fish complete commands, options and their values.

The script is made from the options of the built-in commands and of those that installed packages add, and needs no
Python while you type; make it again after an update.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress

from kdtrain.config import choices
from kdtrain.config.commands import CompletionConfig
from kdtrain.config.kinds import choices as words_of
from kdtrain.config.registered import COMMANDS
from kdtrain.config.values import flag, options_of
from kdtrain.errors import UsageError
from kdtrain.models.spec import shipped
from kdtrain.registry import Registry


def main(config: CompletionConfig) -> int:
    """Print the script of the shell."""
    print(SCRIPTS[config.shell](), end="")
    return 0


def flags(kind: type) -> dict[str, list[str] | None]:
    """Return the flags of a command, each with the words that it takes: none for a switch; None: any text or a file."""
    names = {each.option: list(each.help()) for each in vars(choices).values() if isinstance(each, Registry)}
    names |= {"--teacher": list(shipped("teachers")), "--student": list(shipped("students"))}
    found: dict[str, list[str] | None] = {}
    for each in options_of(kind).values():
        if each.switch:
            found |= {each.flag: words_of(each.kind), flag(f"no_{each.name}"): []}
        elif not each.positional:
            found[each.flag] = words_of(each.kind) or names.get(each.flag)
    return found | {"--help": []}


def _commands() -> Iterator[tuple[str, dict[str, list[str] | None], str]]:
    """Yield each command, its flags, and the words that may stand without one; skip a package that fails to load."""
    COMMANDS.every()  # names what is broken
    for name in COMMANDS.help():
        with suppress(UsageError):
            kind = COMMANDS.get(name).config
            words = [word for each in options_of(kind).values() if each.positional for word in words_of(each.kind)]
            yield name, flags(kind), " ".join(words)


def bash() -> str:
    """Return the script for bash: `source` it, or put it into a folder that bash-completion reads."""
    known = list(_commands())
    cases = []
    values = []
    for name, found, places in known:
        cases.append(f'    {name}) flags="{" ".join(found)}" words="{places}" ;;')
        values += [f'    "{name} {each}") words="{" ".join(words)}" ;;' for each, words in found.items() if words]
    return f"""# kdtrain completion bash
_kdtrain() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}"
  local flags="" words=""
  COMPREPLY=()
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(name for name, *_ in known)} --help --version" -- "$current"))
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
    """Return the script for zsh, which runs the functions of bash."""
    return f"autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n{bash()}"


def fish() -> str:
    """Return the script for fish: put it into ~/.config/fish/completions/kdtrain.fish."""
    lines = ["# kdtrain completion fish"]
    for command, found, words in _commands():
        text = COMMANDS.help()[command].replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c kdtrain -f -n __fish_use_subcommand -a {command} -d '{text}'")
        seen = f"-n '__fish_seen_subcommand_from {command}'"
        lines += [f"complete -c kdtrain -f {seen} -a '{words}'"] if words else []
        for name, each in found.items():
            if each is None:
                takes = " -r -F"
            else:
                takes = f" -r -a '{' '.join(each)}'" if each else ""
            lines.append(f"complete -c kdtrain {seen} -l {name.removeprefix('--')}{takes}")
    return "\n".join(lines) + "\n"


SCRIPTS: dict[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish}
