"""The options of a command, as its configuration's class declares them."""

import dataclasses
from dataclasses import dataclass
from typing import Any, get_type_hints

from kdtrain.config.kinds import alternatives, documented
from kdtrain.config.registered import sections_of
from kdtrain.config.values import default_of, flag
from kdtrain.errors import UsageError


@dataclass(frozen=True)
class Option:
    """One option of a command: a field of its configuration, or of a section of it."""

    owner: type
    """The class that declares it."""
    section: str
    """Its table in a file; `run` for those of the command itself."""
    name: str
    """As in Python, with underscores."""
    kind: Any
    """Its annotation."""
    field: dataclasses.Field[Any]
    """What was declared beside it."""
    default: Any = dataclasses.MISSING
    """Its value where none is given: that of its section's default, if the section has one."""

    @property
    def text(self) -> str:
        """Its docstring."""
        return documented(self.owner).get(self.name, "")

    @property
    def flag(self) -> str:
        """What users type for it."""
        return self.name.upper() if self.positional else flag(self.name)

    @property
    def switch(self) -> bool:
        """True if the flag takes no value: `--json`, `--no-compile`."""
        return alternatives(self.kind) == [bool]

    @property
    def required(self) -> bool:
        """True if it has no default."""
        return self.default is dataclasses.MISSING

    @property
    def several(self) -> bool | str:
        """True if its flag is given again for each value; a comma that joins them."""
        return self.field.metadata.get("several", False)  # type: ignore[no-any-return]

    @property
    def positional(self) -> bool:
        """True if it may be given without its flag."""
        return bool(self.field.metadata.get("positional"))


def options_of(kind: type, section: str = "run", default: Any = None) -> dict[str, Option]:
    """The options of a configuration's class, by name. UsageError: a section of it holds another section.

    default: an instance of it, whose values are the defaults.
    """
    hints, found = get_type_hints(kind, include_extras=True), dict[str, Option]()
    for each in dataclasses.fields(kind):
        inner, value = hints[each.name], default_of(kind, each.name) if default is None else getattr(default, each.name)
        if not each.init or each.metadata.get("plugins"):  # the class computes it
            continue
        if dataclasses.is_dataclass(inner):
            if section != "run":
                raise UsageError(f"[{section}] of a command holds the section '{each.name}'; put it beside [{section}]")
            found |= options_of(inner, each.name, None if value is dataclasses.MISSING else value)  # type: ignore[arg-type]
        else:
            found[each.name] = Option(kind, section, each.name, inner, each, value)
    for name, inner in sections_of(kind).items():
        added = options_of(inner, name)
        if taken := found.keys() & added.keys():
            raise UsageError(f"the plugin's section [{name}] has an option '{min(taken)}', which is taken; rename it")
        found |= added
    return found
