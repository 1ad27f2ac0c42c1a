"""`npugraph-ex help NAME`: cause and remedy of an error, a device code or a finding; what a public name is; as the pages say."""

from __future__ import annotations

import argparse
import builtins
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npugraph_ex.commands import options, public_names
from npugraph_ex.commands.terminal import completes, show
from npugraph_ex.commands.validate import VERDICTS
from npugraph_ex.config import OPTION_TABLE
from npugraph_ex.errors import UsageError
from npugraph_ex.report.findings import MEANING

_DESCRIPTION = """\
Print what causes an error and what to do about it: a class of npugraph_ex or npu_emulator,
one of torch or Python that compiled programs raise, a code of the device, a finding of the stream check,
or a verdict of `npugraph-ex validate`.
Upper and lower case are the same.
Of a compile option, print what `npugraph-ex options` says; of a command, its own help.
Of a public class, function or method, print what it is, and where the documentation describes it and has an example.

examples:
  npugraph-ex help CaptureError
  npugraph-ex help 107030
  npugraph-ex help read-after-write
  npugraph-ex help capture_limit
  npugraph-ex help ShapeRange
  npugraph-ex help                 every error and code that has a section
"""


def add_parser(commands: Any) -> None:
    """Describe the command line."""
    parser = commands.add_parser(
        "help", help="cause and remedy of an error, a code or a finding; what an option, a command or a public name does",
        description=_DESCRIPTION,
    )  # fmt: skip
    name = parser.add_argument(
        "name",
        nargs="?",
        help="a class such as CaptureError, a code such as 107030 or read-after-write, an option, a command, or a public name",
    )
    completes(
        name, lambda: [*sections(), *VERDICTS, *OPTION_TABLE, *commands.choices, *_public(), *_methods(_public())]
    )
    parser.set_defaults(commands=commands.choices)


def run(arguments: argparse.Namespace) -> int:
    """Print what is known of one name, or the names of all sections; the exit status is 0.

    Raises:
        UsageError: nothing has this name; the message has the nearest ones.
    """
    found = sections()
    if arguments.name is not None:
        found |= {name: f"{options.described(row)}\ndefault: {row.default!r}" for name, row in OPTION_TABLE.items()}
        found |= {name: f"A verdict of `npugraph-ex validate`: {meaning}." for name, meaning in VERDICTS.items()}
        found |= {name: command.format_help().rstrip() for name, command in arguments.commands.items()}
        public = _public()
        asked = arguments.name.rpartition(".")[2]
        public |= {one: homes for one, homes in _methods(public).items() if one not in public and one not in found}
        by_case = {known.lower(): known for known in (*public, *found)}
        name = asked if asked in public or asked in found else by_case.get(asked.lower(), asked)
        if name in public and "Cause." not in found.get(name, ""):
            homes = [home for home in public[name] if f"{home}.{name}".endswith(arguments.name)] or public[name]
            error = f"{name}Error"
            remedy = f"{error}\n\n{found[error]}" if error in found else None
            said = [found.get(name), *(_described(home, name) for home in homes), remedy]
            found[name] = "\n\n".join(filter(None, said))
        if name not in found and name.lower() in _of_python():
            name = "BackendCompilerFailed"  # out of a backend it is a fault, and Dynamo wraps it so
        if name not in found:
            if asked.isdigit():
                raise UsageError(
                    f"the emulated device never gives the code {asked}, and this library has no remedy for it; CANN's documents "
                    "explain all codes. `npugraph-ex help` lists those that it gives"
                )
            low = asked.lower()
            near = [one for one in by_case if low in one] or difflib.get_close_matches(low, by_case, n=3)
            close = [by_case[known] for known in near[:3]]
            perhaps = f"; perhaps {' or '.join(close)}" if close else ""
            raise UsageError(f"nothing is known of {name!r}{perhaps}. `npugraph-ex help` lists errors and codes")
        found = {name: found[name]}
    text = "\n".join(found) if arguments.name is None else f"{name}\n\n{found[name]}"
    show(arguments, found, text)
    return 0


def sections() -> dict[str, str]:
    """Causes and remedies, by the name of a class or by a code: text without links."""
    page = _page("errors.md")
    found = dict(re.findall(r"^### (\w+)\n\n(.*?)\n*(?=^#|\Z)", page, re.MULTILINE | re.DOTALL))
    rows = re.findall(r"^\| (\d+) `(\w+)` \| (.*) \| (.*) \|$", _page("emulator-codes.md"), re.MULTILINE)
    for code, name, cause, remedy in rows:
        found[code] = f"{name}.\n\nCause. {cause[0].upper()}{cause[1:]}.\n\nRemedy. {remedy[0].upper()}{remedy[1:]}."
    for word, (_, meaning, remedy) in MEANING.items():
        found[word.value] = f"A finding of the stream check.\n\nCause. {meaning}\n\nRemedy. {remedy}"
    return {name: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).replace("*", "") for name, text in found.items()}


def _of_python() -> set[str]:
    """The names of the exceptions that come with Python, in lower case."""
    kinds = {name: kind for name, kind in vars(builtins).items() if isinstance(kind, type)}
    return {
        name.lower() for name, kind in kinds.items() if issubclass(kind, Exception) and not issubclass(kind, Warning)
    }


def _public() -> dict[str, list[str]]:
    """The modules of each public name, and of each class that a public function returns."""
    homes: dict[str, list[str]] = {}
    for module in public_names.MODULES:
        for name in public_names.offered(module):
            homes.setdefault(name, []).append(module)
    for module, name in re.findall(r"autoapiclass:: ([\w.]+)\.(\w+)", _page("returned-objects.md")):
        homes.setdefault(name, []).append(module)
    return homes


def _methods(public: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """The classes of each public method, with their modules."""
    classes: dict[str, list[str]] = {}
    for name, module in ((name, module) for name, modules in public.items() for module in modules):
        for method in public_names.methods(module, name):
            classes.setdefault(method, []).append(f"{module}.{name}")
    return classes


def _described(home: str, name: str) -> str:
    """What a public name of a module is, or a method of a class; and its places in the documentation."""
    module, _, owner = home.rpartition(".")
    is_method = owner[0].isupper()
    module = module if is_method else home
    said = public_names.methods(module, owner)[name] if is_method else public_names.described(module, name)
    if module not in public_names.MODULES:
        pages = [f"reference/returned-objects.html#{home}.{name}"]
    else:
        pages = [f"api/{module.replace('.', '/')}/index.html#{home}.{name}"]
        pages += [] if is_method else [f"reference/examples.html#{home}.{name}"]
    return f"{home}.{name}: {said}\n\nIn the documentation: {' and '.join(pages)}"


def _page(name: str) -> str:
    """A page of the reference: inside the installed package, or in the checkout."""
    home = Path(__file__).parents[1]
    folders = (home / "_help", home.parent / "docs" / "reference")
    return next(folder / name for folder in folders if (folder / name).exists()).read_text(encoding="utf-8")
