"""The command that installs an extra of this package, for the way in which it is installed here.

A name alone means something only to an index that has the package; a checkout or a wheel is named by its place.
"""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

_NAME = "npugraph-ex"


def install_command(extra: str = "") -> str:
    """What to type in order to install the package again, with one of its extras.

    Args:
        extra: its name; empty for the package alone.
    """
    wanted = f"[{extra}]" if extra else ""
    try:
        installed = metadata.distribution(_NAME)
    except metadata.PackageNotFoundError:  # a checkout that is only on the path
        return f"pip install -e {shlex.quote(f'{Path(__file__).parents[2]}{wanted}')}"
    text = installed.read_text("direct_url.json")
    if text is None:  # from an index
        return f"pip install {shlex.quote(f'{_NAME}{wanted}')}"
    origin = json.loads(text)
    address = urlsplit(origin["url"])
    if address.scheme != "file":
        return f"pip install {shlex.quote(f'{_NAME}{wanted} @ {_with_revision(origin)}')}"
    path = Path(url2pathname(address.path))
    if not path.exists():  # the wheel was deleted, say
        return f"pip install {' '.join(shlex.quote(name) for name in _requirements(installed, extra)) or _NAME}"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{path}{wanted}')}"


def _with_revision(origin: dict[str, Any]) -> str:
    """The address with the version control system and the commit, if it is one of a repository."""
    repository = origin.get("vcs_info")
    return f"{repository['vcs']}+{origin['url']}@{repository['commit_id']}" if repository else str(origin["url"])


def _requirements(installed: metadata.Distribution, extra: str) -> list[str]:
    """What an extra consists of."""
    from packaging.requirements import Requirement

    found = []
    for line in installed.requires or ():
        requirement = Requirement(line)
        if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            found.append(f"{requirement.name}{requirement.specifier}")
    return found
