"""Pack the wheels that a borrowed machine with a GPU lacks: `python -m benchmarks.pack [--out DIR] [--present FILE]`.

Such a machine has Python 3.12 on x86-64 Linux, torch with CUDA, transformers, and no network. This runs where pip has a
package index. It starts from the requirements in pyproject.toml, with the extras of `EXTRAS`, leaves out what the
machine has, follows the requirements of each wheel, and puts all of them into one folder of at most 64 MiB, at the
versions of constraints.txt. It then prints the line that installs them there. `--present` is a file with what `pip
list` prints on that machine; without it, `PRESENT` is assumed. Of hdf5plugin's filters only those are packed
that caches use, 5 of 44 MiB; it names the others when it is imported.

What this gives up: versions of what is there already are not compared with what the wheels ask for, and
TransformerEngine is not packed, because it is built against the torch of the machine.
"""

import argparse
import io
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from email import message_from_bytes
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.harness import ROOT

LIMIT = 64 * 2**20
"""Bytes of all wheels together."""
EXTRAS = ("data", "fp8", "peers", "plot", "tensorboard")
PRESENT = (
    *("torch", "triton", "transformers", "accelerate", "tokenizers", "safetensors", "huggingface-hub", "fsspec"),
    *("numpy", "pandas", "pyarrow", "h5py", "einops", "rich", "tensorboard", "filelock", "packaging", "pyyaml", "tqdm"),
    *("regex", "xxhash", "jinja2", "psutil", "typing-extensions"),
    *("pytest", "pytest-timeout", "hypothesis", "matplotlib"),
)
"""Packages assumed to be on the machine."""
MACHINE = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "os_name": "posix"} | {
    **{"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython", "extra": ""}
}
PLATFORMS = tuple(f"manylinux{name}_x86_64" for name in ("_2_28", "_2_27", "_2_24", "_2_17", "2014"))
FILTERS = ("libh5bshuf.so", "libh5zstd.so")
"""The filters of hdf5plugin that caches use."""


def main(argv: list[str] | None = None) -> int:
    """Fill the folder, and print what is in it and how to install it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "packages", help="a new folder (runs/packages)")
    parser.add_argument("--present", type=Path, help="a file with what `pip list` prints on the machine")
    arguments = parser.parse_args(argv)
    out: Path = arguments.out
    if out.exists():
        print(f"{out} exists; remove it or name another --out", file=sys.stderr)
        return 2
    # the words of a list are names and versions, and no package is named like a version
    present = PRESENT if arguments.present is None else arguments.present.read_text().split()
    size = pack(out, {canonicalize_name(word) for word in present})
    for wheel in sorted(out.glob("*.whl")):
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    print(f"{size / 2**20:6.1f} MiB of at most {LIMIT / 2**20:.0f}. There, from the folder above {out.name}:")
    print(f"python3 -m pip install --no-index --no-deps --target /tmp/packages {out.name}/*.whl")
    print("PYTHONPATH=/tmp/packages:. python3 -m benchmarks.performance ...")
    return int(size > LIMIT)


def download(names: Iterable[str], folder: Path) -> None:
    """Download the wheels of these packages to a folder by pip, without what they require."""
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", MACHINE["python_version"], "--implementation", "cp", *platforms]
    command += ["--constraint", str(ROOT / "constraints.txt"), "--dest", str(folder), *names]
    subprocess.run(command, check=True)


def pack(out: Path, present: set[str]) -> int:
    """Put every wheel that is needed and not present into `out`; bytes of all of them."""
    out.mkdir(parents=True)
    done, wanted = set(present), roots() - present
    while wanted:
        download(sorted(wanted), out)
        done |= wanted
        wanted = {name for wheel in out.glob("*.whl") for name in required(wheel)} - done
    for wheel in out.glob("hdf5plugin-*.whl"):
        trim(wheel)
    return sum(wheel.stat().st_size for wheel in out.glob("*.whl"))


def roots() -> set[str]:
    """Return the packages that kdtrain and its extras require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    return {canonicalize_name(Requirement(line).name) for line in lines}


def required(wheel: Path) -> set[str]:
    """Return the packages that a wheel requires on the machine."""
    with zipfile.ZipFile(wheel) as content:
        (metadata,) = (name for name in content.namelist() if name.endswith(".dist-info/METADATA"))
        lines = message_from_bytes(content.read(metadata)).get_all("Requires-Dist", [])
    found = map(Requirement, lines)
    return {canonicalize_name(each.name) for each in found if each.marker is None or each.marker.evaluate(MACHINE)}


def trim(wheel: Path) -> None:
    """Write hdf5plugin's wheel again without the filters that caches do not use."""
    smaller = io.BytesIO()
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as new:
        dropped = {name for name in old.namelist() if "/libh5" in name and not name.endswith(FILTERS)}
        for entry in old.infolist():
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if line.partition(",")[0] not in dropped).encode()
            if entry.filename not in dropped:
                new.writestr(entry, content)
    wheel.write_bytes(smaller.getvalue())


if __name__ == "__main__":
    sys.exit(main())
