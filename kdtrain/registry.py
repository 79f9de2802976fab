"""The names that an option takes, each with its code and a line of help; a user's package can add its own.

A registry lists its built-in names with their help (`kdtrain.config.choices`), so that `--help` needs no torch; the
module with their code (`home`) registers them when it is imported. A package adds a name by an entry point in the group
of the registry. The entry point names the module that registers it:

    [project.entry-points."kdtrain.divergences"]
    mine = "my_package.losses"

Entry points are listed once, without importing anything; a package is imported when its name is first used. A built-in
name always means the built-in. Plugins that come with kdtrain (`kdtrain/plugins`) register in the same way. Their
modules import nothing heavy, so they are imported for their lines of help; one whose folder was deleted is not listed.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any, TypeVar, cast

from kdtrain.errors import UsageError

T = TypeVar("T")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint: the known name that is closest to `word`, or all known names."""
    known = list(known)
    close = difflib.get_close_matches(word, known, 1)
    return f"perhaps you meant '{close[0]}'" if close else f"known are {', '.join(known)}"


def first_line(documented: Any) -> str:
    """The first line of a docstring of a class or function; of its source if `python -OO` has removed it."""
    text = documented.__doc__ or ""
    if sys.flags.optimize > 1:  # a dataclass then has its signature instead
        text = ""
        with suppress(OSError, TypeError, SyntaxError):  # there is no source
            found = ast.parse(textwrap.dedent(inspect.getsource(documented))).body[0]
            text = ast.get_docstring(found) or ""  # type: ignore[arg-type]
    return text.partition("\n")[0]


class Registry:
    """The names that one option takes.

    Args:
        option: the flag, for messages.
        group: the group of entry points by which a package adds a name.
        home: the module that registers the built-in names.
        builtin: the built-in names, each with a line of help.
        traits: what an option's checks ask about the built-in names, so that no code asks for a name (`has`).
    """

    def __init__(
        self,
        option: str,
        group: str,
        home: str,
        builtin: dict[str, str],
        traits: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.option, self.group, self.home, self.builtin = option, group, home, builtin
        self._traits = dict(traits or {})
        self.entries: dict[str, Any] = {}
        """What is registered so far: the built-in names once `home` is imported, and the packages used."""
        self._help = dict(builtin)
        self.modules: dict[str, str] = {}
        """The module that registered each."""

    def add(self, name: str, entry: Any, source: Any, help: str = "", traits: Collection[str] = ()) -> None:
        """Register `entry`, made from the function or class `source`, whose first docstring line is the default help.

        traits: of a name that is not built in.

        Raises:
            UsageError: another module has registered this name.
        """
        if (other := self.modules.setdefault(name, source.__module__)) != source.__module__:
            raise UsageError(f"{self.option} {name} is registered by {other} and by {source.__module__}; rename one")
        self.entries[name] = entry
        if name not in self.builtin:
            self._help[name] = help or first_line(source)
            self._traits[name] = traits

    def registers(
        self, name: str, help: str, make: Callable[[Any], Any] = lambda source: source, traits: Collection[str] = ()
    ) -> Callable[[T], T]:
        """Decorator: `add` a function or class, or what `make` makes of it."""

        def register(source: T) -> T:
            self.add(name, make(source), source, help, traits)
            return source

        return register

    def get(self, name: str) -> Any:
        """The entry called `name`.

        Raises:
            UsageError: no package or more than one has this name, or its package cannot be imported.
        """
        if not isinstance(name, str):
            raise UsageError(f"{self.option} {name!r} is not a name")
        if name not in self.entries:
            if name in self.builtin:
                importlib.import_module(self.home)
            else:
                self._load(name)
        return self.entries[name]

    def check(self, name: str) -> None:
        """As `get`, without importing anything for a built-in name."""
        if name not in self.builtin:
            self.get(name)

    def has(self, name: str, trait: str) -> bool:
        """True if the entry called `name` has a trait; imports nothing for a built-in name. UsageError: as `get`."""
        self.check(name)
        return trait in self._traits.get(name, ())

    def names(self) -> list[str]:
        """Every name, without an import."""
        return list(dict.fromkeys([*self._help, *self._packages]))

    def help(self) -> dict[str, str]:
        """Every name with its line of help, or with its package if that is not imported yet."""
        lines = dict(self._help)
        for name, found in self._packages.items():
            if name not in lines:
                if _is_own(found[0]):
                    self.get(name)
                lines[name] = self._help.get(name, f"from the package {_package(found[0])}")
        return lines

    @property
    def _packages(self) -> dict[str, list[EntryPoint]]:
        return _installed(tuple(sys.path)).get(self.group, {})

    def _load(self, name: str) -> None:
        found = self._packages.get(name, [])
        if not found:
            raise UsageError(f"{self.option} {name} is unknown; {nearest(name, self.help())}")
        if len(found) > 1:
            raise UsageError(f"{self.option} {name} is in {' and in '.join(map(_package, found))}; uninstall one")
        try:
            found[0].load()
        except Exception as error:
            reason = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            raise UsageError(
                f"{self.option} {name}: the package {_package(found[0])} fails to load: {reason}"
            ) from error
        if name not in self.entries:
            raise UsageError(
                f"{self.option} {name}: {found[0].value} of the package {_package(found[0])} does not register it"
            )


@cache
def _installed(path: tuple[str, ...]) -> dict[str, dict[str, list[EntryPoint]]]:
    """The entry points for kdtrain of all packages on `path`, by group and name; no plugin whose folder is missing."""
    found: dict[str, dict[str, list[EntryPoint]]] = {}
    known = cast(EntryPoints, entry_points())
    for group in (each for each in known.groups if each.startswith("kdtrain.")):
        names = found.setdefault(group, {})
        for each in known.select(group=group):
            with suppress(ModuleNotFoundError):  # its parent is missing
                if not _is_own(each) or importlib.util.find_spec(each.module) is not None:
                    names.setdefault(each.name, []).append(each)
    return found


def _is_own(found: EntryPoint) -> bool:
    """Whether it is of a plugin that comes with kdtrain."""
    return _package(found) == "kdtrain"


def _package(found: EntryPoint) -> str:
    return found.dist.name if found.dist else found.value
