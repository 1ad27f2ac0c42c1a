"""The command line of a module that takes a few words: `--help` and wrong use are answered as the commands answer them."""

from __future__ import annotations

import argparse


def words(module: str, description: str | None, *required: tuple[str, str], **optional: tuple[str, str]) -> list[str]:
    """The words of the command line, in order.

    Args:
        module: behind `python -m`.
        description: what it does.
        required: the name and meaning of each.
        optional: for each further one its default and meaning.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, meaning in required:
        parser.add_argument(name, help=meaning)
    for name, (default, meaning) in optional.items():
        parser.add_argument(name, nargs="?", default=default, help=f"{meaning} (default: {default})")
    return [*vars(parser.parse_args()).values()]
