"""The names that an option takes, each with its code and a line of help; a user's package can add its own.

A registry lists its built-in names with their help (`kdtrain.config.choices`), so that `--help` needs no torch; the
module with their code (`home`) registers them when it is imported. A package adds a name by an entry point in the group
of the registry. The entry point names the module that registers it:

    [project.entry-points."kdtrain.divergences"]
    mine = "my_package.losses"

Entry points are listed once, without importing anything; a package is imported when its name is first used. A built-in
name always means the built-in. Plugins that come with kdtrain (`kdtrain/plugins`) register in the same way. Their
modules import nothing heavy, so they are imported for their lines of help; one whose folder was deleted is not listed.

A stranger's package that is broken ends no command: one line names it, and all of it is left out. Where a name of it is
requested, the reason is the answer.
"""

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import redirect_stdout, suppress
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, distributions, entry_points
from typing import Any, ClassVar, TypeVar, cast

from kdtrain.errors import UsageError, printable

T = TypeVar("T")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint: the known name that is closest to `word`, or all known names."""
    known = list(known)
    close = difflib.get_close_matches(word, known, 1)
    return f"perhaps you meant '{close[0]}'" if close else f"known are {', '.join(known)}"


def first_line(documented: Any) -> str:
    """Return the first line of a class's or function's docstring; of its source if `python -OO` removed it."""
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
        home: the module that registers the built-in names, or that of each by name.
        builtin: the built-in names, each with a line of help.
        traits: what an option's checks ask about the built-in names, so that no code asks for a name (`has`).
    """

    all: ClassVar[list["Registry"]] = []
    left_out: ClassVar[dict[str, str]] = {}
    """Why a package is left out, by its name."""
    unreadable: ClassVar[list[str]] = []
    """Those of them whose entry points cannot be read, by torch neither."""

    def __init__(
        self,
        option: str,
        group: str,
        home: str | Mapping[str, str],
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
        self.all.append(self)

    def add(self, name: str, entry: Any, source: Any, help: str = "", traits: Collection[str] = ()) -> None:
        """Register `entry`, made from the function or class `source`, whose first docstring line is the default help.

        traits: of a name that is not built in.

        Raises:
            UsageError: another module has registered this name, or it is one of kdtrain's.
        """
        module = usual = source.__module__ or "__main__"
        if not module.startswith("kdtrain.") and (name in self.builtin or self._is_own(name)):
            usual = "kdtrain"
        if (other := self.modules.get(name, usual)) != module:
            raise UsageError(f"{self.option} {name} is registered by {other} and by {module}; rename one")
        self.modules[name] = module
        self.entries[name] = entry
        if name not in self.builtin:
            self._help[name] = help or first_line(source)
            self._traits[name] = traits

    def registers(
        self, name: str, help: str, make: Callable[[Any], Any] = lambda source: source, traits: Collection[str] = ()
    ) -> Callable[[T], T]:
        """Return a decorator that registers, as `add` does, a function or class, or what `make` makes of it."""

        def register(source: T) -> T:
            self.add(name, make(source), source, help, traits)
            return source

        return register

    def get(self, name: str) -> Any:
        """Return the entry called `name`.

        Raises:
            UsageError: no package or more than one has this name, or its package cannot be imported.
        """
        if not isinstance(name, str):
            raise UsageError(f"{self.option} {name!r} is not a name")
        if name not in self.entries:
            if name in self.builtin:
                importlib.import_module(self.home if isinstance(self.home, str) else self.home[name])
            else:
                self._load(name)
        return self.entries[name]

    def check(self, name: str) -> None:
        """Raise an error as `get` does, without importing anything for a built-in name."""
        if name not in self.builtin:
            self.get(name)

    def has(self, name: str, trait: str) -> bool:
        """Return True if the entry `name` has a trait. Imports nothing for a built-in name. UsageError: as `get`."""
        self.check(name)
        return trait in self._traits.get(name, ())

    def names(self) -> list[str]:
        """Return every name, without an import."""
        return list(dict.fromkeys([*self._help, *self._packages]))

    def help(self) -> dict[str, str]:
        """Return every name with its line of help, or with its package if that is not imported yet."""
        lines = dict(self._help)
        for name, found in self._packages.items():
            if name not in lines:
                if _is_own(found[0]):
                    self.get(name)
                lines[name] = self._help.get(name, f"from the package {_package(found[0])}")
        return lines

    def every(self) -> dict[str, Any]:
        """Return all entries by name, also of packages, which are imported; a broken package is left out."""
        for name in sorted(self._packages, key=lambda each: (not self._is_own(each), each)):  # others' are the clashes
            packages = [_package(each) for each in self._packages[name]]
            if self.left_out.keys().isdisjoint(packages):
                try:
                    self.get(name)
                except UsageError as error:
                    if self._is_own(name):
                        raise
                    _leave_out(packages, str(error))
        return dict(sorted(self.entries.items()))

    def forget(self, package: str, module: str) -> None:
        """Remove a package's entries: of one of its entry points, or of a module in the package that `module` is in."""
        for name, source in [*self.modules.items()]:
            root = source.partition(".")[0]
            of = map(_package, self._packages.get(name, []))
            if root != "kdtrain" and (root == module.partition(".")[0] or package in of):
                for table in (self.entries, self._help, self.modules, self._traits):
                    table.pop(name, None)  # type: ignore[attr-defined]

    def _is_own(self, name: str) -> bool:
        return any(map(_is_own, self._packages.get(name, [])))

    @property
    def _packages(self) -> dict[str, list[EntryPoint]]:
        return _installed(tuple(sys.path)).get(self.group, {})

    def _load(self, name: str) -> None:
        found = self._packages.get(name, [])
        if not found:
            raise UsageError(f"{self.option} {name} is unknown; {nearest(name, self.help())}")
        if len(found) > 1:
            raise UsageError(f"{self.option} {name} is in {' and in '.join(map(_package, found))}; uninstall one")
        package = _package(found[0])
        why = self.left_out.get(package, "")
        if not why:
            try:
                with redirect_stdout(sys.stderr):  # stdout may be one JSON object
                    found[0].load()
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # a module may also exit
                reason = str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
                why = f"the package {package} fails to load: {reason}"
            else:
                if name not in self.entries:
                    why = f"{found[0].value} of the package {package} does not register it"
        if why:
            for each in self.all:
                each.forget(package, found[0].value)
            raise UsageError(f"{self.option} {name}: {why}")


def own_names() -> list[str]:
    """Return the names that plugins of kdtrain offer as `kdtrain.NAME`."""
    return [each.name for each in _offers() if _is_own(each) and not _is_gone(each)]


def offered(name: str) -> Any:
    """Return what the packages that offer `kdtrain.NAME` have, a plugin of kdtrain before others.

    AttributeError: its module fails to load.
    """
    found = next(each for each in _offers() if each.name == name)
    try:
        with redirect_stdout(sys.stderr):
            return getattr(found.load(), name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a module may also exit
        why = f"{found.value} of the package {_package(found)} fails to load: {type(error).__name__}: {error}"
        raise AttributeError(f"kdtrain.{name}: {why}") from error


def _offers() -> list[EntryPoint]:
    """List the entry points of names of the library, kdtrain's own first."""
    found = [each for each in _entry_points() if each.group == "kdtrain.library"]
    return sorted(found, key=lambda each: not _is_own(each))


@cache
def _installed(path: tuple[str, ...]) -> dict[str, dict[str, list[EntryPoint]]]:
    """Return kdtrain's entry points of all packages on `path`, by group and name; no plugin whose folder is missing."""
    found: dict[str, dict[str, list[EntryPoint]]] = {}
    for each in _entry_points():
        if each.group.startswith("kdtrain.") and not _is_gone(each):
            found.setdefault(each.group, {}).setdefault(each.name, []).append(each)
    for names in found.values():
        for name, points in names.items():
            if len(points) > 1 and (own := [each for each in points if _is_own(each)]):
                others = [_package(each) for each in points if each not in own]
                _leave_out(others, f"{name} of the package {', '.join(others)} has the name of a plugin of kdtrain")
                names[name] = own
    return found


def _entry_points() -> list[EntryPoint]:
    """Return the entry points of all packages; a package with a file that cannot be read is left out."""
    try:
        known = cast(EntryPoints, entry_points())
        return [each for group in known.groups for each in known.select(group=group)]
    except Exception:  # it does not name the package
        found = list[EntryPoint]()
        seen = set[str]()
    for each in distributions():
        name = each.metadata["Name"] or "without a name"
        try:
            found += [] if name in seen else each.entry_points
        except Exception as error:
            _leave_out([name], f"the entry points of the package {name} cannot be read: {error!r}")
            Registry.unreadable.append(name)
        seen.add(name)
    return found


def _leave_out(packages: list[str], why: str) -> None:
    """Leave out these packages, and print that in one line, once for all ranks."""
    new = {each: why for each in packages if each not in Registry.left_out}
    Registry.left_out |= new
    if new and os.environ.get("RANK", "0") == "0":
        print(f"kdtrain: {printable(' '.join(why.split()))}; it is left out", file=sys.stderr)


def _is_own(found: EntryPoint) -> bool:
    """Return True for an entry point of a plugin that comes with kdtrain."""
    return _package(found) == "kdtrain"


def _is_gone(found: EntryPoint) -> bool:
    """Return True for an entry point of a plugin that came with kdtrain, and whose folder was deleted."""
    folder = ".".join(found.module.split(".")[:3])  # no deeper, where a look would import the plugin
    try:
        return _is_own(found) and importlib.util.find_spec(folder) is None
    except ModuleNotFoundError:  # all plugins are gone
        return True


def _package(found: EntryPoint) -> str:
    return found.dist.name if found.dist else found.value
