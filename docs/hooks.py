"""What mkdocs adds to the pages of this folder: the reference, the notebook, and files from outside of `docs`.

A page is also read on its own, in the repository, so its links are paths there. README.md becomes the first page; a
page or a file outside of `docs` that a page links to is taken along as `repository/PATH`, and links follow. The
reference is made from the code at each build: options from the dataclasses of `kdtrain.config`, names of the library
from their docstrings by mkdocstrings, which reads the source and imports nothing.
"""

import ast
import dataclasses
import inspect
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import docstring_parser
from markdown.extensions import Extension
from markdown.preprocessors import Preprocessor
from mkdocs.structure.files import File

from kdtrain import cli
from kdtrain.config import choices
from kdtrain.config.values import flag, sections_of
from kdtrain.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def place(path: str) -> str:
    """Return the place on the site of a file of the repository; both are relative to their roots."""
    if path == "README.md":
        return "index.md"
    inside = path.removeprefix("docs/") if path.startswith("docs/") else f"repository/{path}"
    return inside.removesuffix(".ipynb") + ".md" if inside.endswith(".ipynb") else inside


def targets(text: str, home: str) -> list[str]:
    """List the files of the repository that the page `home` links to."""
    found = [os.path.normpath(Path(home).parent / path) for _, path, _ in LINK.findall(text)]
    return [each for each in found if (ROOT / each).is_file()]


def moved(text: str, home: str) -> str:
    """Return the page `home` with its links as the site has them; a label that is a path becomes the page's title."""

    def link(match: re.Match[str]) -> str:
        path = os.path.normpath(Path(home).parent / match[2])
        if not (ROOT / path).is_file():
            return match[0]
        label = title(path) if match[1].endswith(".md") else match[1]
        return f"[{label}]({os.path.relpath(place(path), Path(place(home)).parent)}{match[3] or ''})"

    return LINK.sub(link, text)


def title(path: str) -> str:
    """Return the first heading of a page of the repository."""
    first = (ROOT / path).read_text().partition("\n")[0]
    return first.removeprefix("# ")


def notebook(path: Path) -> str:
    """Convert a notebook to a page: text, code, and what it printed and drew."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            image = output.get("data", {}).get("image/png")
            if image is not None:
                parts.append(f"![What the cell above draws](data:image/png;base64,{''.join(image).strip()})")
            elif output["output_type"] == "stream":
                parts.append("```text\n" + "".join(output["text"]).rstrip() + "\n```")
    return "\n\n".join(parts) + "\n"


def options() -> str:
    """Write the page of the options of every command, by section."""
    lines = [
        "# Options",
        "",
        "Made from the code. A flag `--seq-len` is the key `seq_len` of its section in a TOML file.",
    ]
    for name in cli.COMMANDS.help():
        kind = cli.COMMANDS.get(name).config
        lines += ["", f"## {name}", "", *_table(kind, [each for each in _fields(kind) if each[2] is None])]
        for field, _, section in _fields(kind):
            if section is not None:
                lines += ["", f"### {name}: [{field.name}]", "", *_table(section, _fields(section))]
    lines += ["", "## Names that options take"]
    for each in vars(choices).values():
        if isinstance(each, Registry):
            lines += ["", f"**{each.option}**", "", *_rows(["name", ""], each.help().items())]
    return "\n".join(lines) + "\n"


def _fields(kind: Any) -> list[tuple[Any, str, Any]]:
    """List each field, its docstring, and its class if it is a section."""
    parsed = [docstring_parser.parse_from_object(each).params for each in reversed(kind.__mro__[:-1])]
    texts = {param.arg_name: param.description or "" for params in parsed for param in params}
    hints = get_type_hints(kind)
    sections = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    declared = [each for each in dataclasses.fields(kind) if not each.metadata.get("plugins")]
    declared.sort(key=lambda each: each.name == "json")
    found = [(each, texts.get(each.name, ""), sections.get(each.name)) for each in declared]
    return found + [(SimpleNamespace(name=name), "", section) for name, section in sections_of(kind).items()]


def _table(kind: Any, fields: list[tuple[dataclasses.Field[Any], str, Any]]) -> list[str]:
    """Write the docstring of a class of options, and a row for each option."""
    rows = [(f"`{flag(each.name)}`", _kind(each.type), _default(each), text) for each, text, _ in fields]
    return [inspect.getdoc(kind) or "", "", *_rows(["option", "takes", "default", ""], rows)]


def _kind(hint: Any) -> str:
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    text = re.sub(r"typing\.|pathlib\.", "", text).replace(" | None", "")
    choice = re.fullmatch(r"Literal\[(.*)\]", text)
    if choice:
        return ", ".join(f"`{each}`" for each in ast.literal_eval(f"({choice[1]},)"))
    names = {"int": "whole number", "float": "number", "str": "text", "bool": "switch", "Path": "path"}
    return names.get(text, f"`{text}`")


def _default(each: dataclasses.Field[Any]) -> str:
    if each.default is dataclasses.MISSING:
        return "must be given"
    if isinstance(each.default, bool):
        return "on" if each.default else "off"
    return "" if each.default in (None, ()) else f"`{each.default}`"


def _rows(head: list[str], rows: Any) -> list[str]:
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *cells]]


def library() -> str:
    """List the names of the library, as directives of mkdocstrings."""
    import kdtrain

    parts = ["# Library", "The names of `import kdtrain as kd`."]
    for name in sorted(kdtrain.__all__):
        short = name.endswith("Config")
        home = "kdtrain" if name in kdtrain._modules() else getattr(kdtrain, name).__module__  # of a plugin
        parts.append(f"::: {home}.{name}" + ("\n    options: {members: false}" if short else ""))
        parts += ["Its fields are the [options](options.md) of the command."] * short
    return "\n\n".join(parts) + "\n"


class Doctests(Extension):
    """Markdown: a paragraph that begins with `>>>` is Python."""

    class _Fence(Preprocessor):
        def run(self, lines: list[str]) -> list[str]:
            return re.sub(r"^(>>> .*(?:\n.+)*)", r"```pycon\n\1\n```", "\n".join(lines), flags=re.M).split("\n")

    def extendMarkdown(self, md: Any) -> None:
        md.preprocessors.register(self._Fence(md), "doctests", 100)


def on_config(config: Any) -> Any:
    """Show the examples of docstrings as code."""
    config["markdown_extensions"].append(Doctests())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made here, and what pages link to outside of this folder."""
    made = {"reference/options.md": options(), "reference/library.md": library()}
    for uri, text in made.items():
        files.append(File.generated(config, uri, content=text))
    waiting = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md")))]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        uri = place(path)
        text = ""
        if path.endswith(".ipynb"):
            text = notebook(ROOT / path)
            files.append(File.generated(config, uri, content=text))
        elif files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
        if path.endswith(".md"):
            text = (ROOT / path).read_text()
        new = [each for each in dict.fromkeys(targets(text, path)) if each not in seen]
        seen.update(new)
        waiting += new
    config["homes"] = {place(path): path for path in seen}
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Replace the links of a page by the site's."""
    home = config["homes"].get(page.file.src_uri)
    return markdown if home is None else moved(markdown, home)
