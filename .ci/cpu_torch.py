"""`pip` for test machines: installs CPU builds of torch also where the index has only CUDA builds, which it rewrites.

`python .ci/cpu_torch.py --torch=2.10.0 <arguments of pip>` puts a wheel of torch 2.10.0+cpu into a folder, if it is not there, and
runs pip with that folder. An index that has the CPU build gives it. Otherwise the CUDA build is downloaded, and its CUDA libraries
(torch's and NVIDIA's) are replaced by libraries of the same names in which no function does anything.

Only for tests. torch_npu cannot be loaded beside a CUDA build of torch 2.12 or later, because both register the same allocator
settings; a user needs the CPU build that the torch project publishes. All other libraries of the wheel stay as they are, so the
tests run torch's own code.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, ZipInfo

CUDA = ("libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")
"""Torch's libraries that call CUDA. The first is always loaded."""
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s|stdc\+\+|gomp)\.so\.\d+|ld-linux.*")
NO_DEVICE = 100
"""CUDA's error code that a function of NVIDIA returns here."""
REFERENCES = {"_ZN4c10d15get_gil_checkerEv"}
"""Functions that `import torch` calls and whose result, a reference, it writes to."""


def pip(*arguments: str) -> int:
    """Run this interpreter's pip."""
    return subprocess.run([sys.executable, "-m", "pip", *arguments], check=False).returncode


def provide(version: str, folder: Path) -> None:
    """Put a wheel of the CPU build into ``folder``."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if any(folder.glob(f"torch-{version}+cpu-*{python}-*.whl")):
        return
    download = ("download", "--quiet", "--no-deps", "--only-binary=:all:")
    if pip(*download, "--dest", str(folder), f"torch=={version}+cpu") == 0:
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if pip(*download, "--dest", scratch, f"torch=={version}") != 0:
            sys.exit(f"cpu_torch: no index has torch {version} for {python}")
        (wheel,) = Path(scratch).glob("torch-*.whl")
        rewrite(wheel, folder)


def rewrite(wheel: Path, folder: Path) -> None:
    """Write the CPU form of a CUDA wheel into ``folder``."""
    name, version, *_, python, abi, platform = wheel.stem.split("-")
    scratch = wheel.parent / "unpacked"
    with ZipFile(wheel) as archive:
        archive.extractall(scratch)
    about, new = scratch / f"{name}-{version}.dist-info", f"{version}+cpu"
    replace_libraries(scratch / "torch" / "lib")
    edit(scratch / "torch" / "version.py", (r"(__version__ = ).*", rf"\1{new!r}"), (r"(cuda: .*= ).*", r"\1None"))
    edit(
        scratch / "torch" / "__init__.py",
        (r"( *)(from torch\._C import \*.*)", r'\1\2\n\1sys.modules["torch._C"]._has_cuda = False'),
    )
    edit(about / "METADATA", (r"(Version: ).*", rf"\g<1>{new}"), (r"Requires-Dist: (cuda-|nvidia-|triton).*\n", ""))
    about = about.rename(scratch / f"{name}-{new}.dist-info")
    files = [path for path in scratch.rglob("*") if path.is_file() and path.name != "RECORD"]
    target = folder / f"{name}-{new}-{python}-{abi}-{platform}.whl"
    with ZipFile(target.with_suffix(".part"), "w", ZIP_STORED) as archive:
        record = io.StringIO()
        rows = csv.writer(record, lineterminator="\n")
        for path in files:
            inside, data = path.relative_to(scratch).as_posix(), path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.writerow((inside, f"sha256={digest}", len(data)))
            archive.write(path, inside)
        rows.writerow((f"{about.name}/RECORD", "", ""))
        archive.writestr(ZipInfo(f"{about.name}/RECORD"), record.getvalue())
    target.with_suffix(".part").rename(target)


def edit(path: Path, *changes: tuple[str, str]) -> None:
    """Apply regular expressions to a text file; each must change something."""
    text = path.read_text(encoding="utf-8")
    for old, new in changes:
        text, count = re.subn(rf"(?m)^{old}", new, text)
        if not count:
            sys.exit(f"cpu_torch: {path.name} has no line {old!r}: torch's wheels have changed")
    path.write_text(text, encoding="utf-8")


def replace_libraries(folder: Path) -> None:
    """Replace each CUDA library that the rest of torch loads by one that has only the symbols which the rest names."""
    given = {name: kind for library in CUDA for kind, name, _ in symbols(folder / library, "--defined-only")}
    for library in CUDA:
        (folder / library).unlink()
    kept = sorted(folder.glob("*.so*"))
    own = {name for library in kept for _, name, _ in symbols(library, "--defined-only")}
    wanted = {(name, origin) for library in kept for _, name, origin in symbols(library, "--undefined-only")}
    missing = {soname for library in kept for soname in needed(library)}
    missing = {soname for soname in missing if not SYSTEM.fullmatch(soname) and not (folder / soname).exists()}
    for soname in missing:
        chosen = {
            name: given.get(name, "T")
            for name, origin in wanted - {(name, "") for name in own}
            if (origin or home(name, given)) == soname
        }
        for name in chosen:
            table = re.sub(r"^_ZN(.*)C[12]E.*", r"_ZTVN\1E", name)
            if table != name and table in own:
                chosen[name] = table
        versioned = any(origin == soname for _, origin in wanted)
        compile_library(folder / soname, chosen, version=soname if versioned else None)


def home(name: str, given: Iterable[str]) -> str | None:
    """Where a symbol without a version goes: all that torch and NVIDIA give go into one library, which is always loaded."""
    return CUDA[0] if name in given or re.match(r"cu|nccl|nvsh", name) else None


def symbols(library: Path, kind: str) -> list[tuple[str, str, str]]:
    """The dynamic symbols of a library: the letter of `nm`, the name, and the library that a version names, or nothing."""
    listed = subprocess.run(
        ["nm", "-D", kind, "--with-symbol-versions", library], capture_output=True, text=True, check=True
    )
    rows = (line.split()[-2:] for line in listed.stdout.splitlines())
    return [(letter, name.partition("@")[0], name.rpartition("@")[2] if "@" in name else "") for letter, name in rows]


def needed(library: Path) -> list[str]:
    """The libraries that a library loads."""
    listed = subprocess.run(["readelf", "-d", library], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", listed)


def compile_library(target: Path, wanted: dict[str, str], *, version: str | None) -> None:
    """Compile a library whose functions only return a number, and whose objects are zeros or the description of a class.

    A constructor whose class has its table of virtual functions elsewhere makes an object of zeros with that table: `import torch`
    makes one as the default of an argument.
    """
    lines = ["#include <malloc.h>", "#include <string.h>", "extern char _ZTVN10__cxxabiv117__class_type_infoE[];"]
    for name, letter in sorted(wanted.items()):
        if name.startswith("_ZTI"):
            lines.append(f'void *{name}[] = {{_ZTVN10__cxxabiv117__class_type_infoE + 16, "{name[4:]}", 0}};')
        elif name in REFERENCES:
            lines.append(f"static void *of_{name}; void *{name}(void) {{ return &of_{name}; }}")
        elif letter.startswith("_ZTV"):
            body = f"memset(self, 0, malloc_usable_size(self)); *self = {letter} + 16;"
            lines.append(f"extern char {letter}[]; void {name}(void **self) {{ {body} }}")
        elif letter in "TWi":
            lines.append(f"long {name}(void) {{ return {NO_DEVICE if name.startswith('cu') else 0}; }}")
        else:
            lines.append(f"char {name}[1024];")
    source, script = target.with_suffix(".c"), target.with_suffix(".map")
    source.write_text("\n".join(lines), encoding="utf-8")
    script.write_text(f"{version or 'none'} {{ global: *; }};", encoding="utf-8")
    named = [f"-Wl,-soname,{target.name}", *([f"-Wl,--version-script={script}"] if version else [])]
    options = ["-shared", "-fPIC", "-w", "-O1", "-fno-builtin", *named]
    subprocess.run(["gcc", *options, "-o", target, source, "-lstdc++"], check=True)
    source.unlink()
    script.unlink()


def main() -> int:
    """Provide the wheel and run pip."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--torch", default=os.environ.get("TORCH"), help="the release of torch; the variable TORCH if left out"
    )
    parser.add_argument("--wheels", type=Path, default=Path(".tox/wheels"), help="the folder of the wheels")
    options, arguments = parser.parse_known_args()
    options.wheels.mkdir(parents=True, exist_ok=True)
    if options.torch is None:
        parser.error("say which release of torch, by --torch or by the variable TORCH")
    provide(options.torch, options.wheels)
    return pip(*arguments, "--find-links", str(options.wheels)) if arguments else 0


if __name__ == "__main__":
    sys.exit(main())
