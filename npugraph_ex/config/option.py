"""What one option is, and the only code that judges a name or a value. The options themselves are in `options.py`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from npugraph_ex.errors import OptionNotAvailableError, OptionValueError, UnknownOptionError


@dataclass(frozen=True)
class Kind:
    """A set of legal values: the words that name it and the test for it."""

    allowed: str
    accepts: Callable[[object], bool]


def choice(*values: str | bool | None) -> Kind:
    """Exactly these values; identity of type counts, so that 0 is not False."""
    words = " or ".join(repr(value) for value in values)
    return Kind(words, lambda given: any(type(given) is type(value) and given == value for value in values))


def at_least(minimum: int) -> Kind:
    """An int from `minimum` upwards; a bool is not an int here."""
    return Kind(f"an int >= {minimum}", lambda given: type(given) is int and given >= minimum)


def _is_pool_handle(given: object) -> bool:
    # torch.npu tells pools that it names from those that callers name by which of the two is 0.
    return (
        isinstance(given, tuple)
        and len(given) == 2
        and all(type(part) is int and part >= 0 for part in given)
        and given.count(0) == 1
    )


def _takes_three_arguments(given: object) -> bool:
    if not callable(given):
        return False
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):  # something built in, which does not tell
        return True
    try:
        signature.bind(None, None, None)
    except TypeError:
        return False
    return True


def _described(given: object) -> str:
    """A value for a message; a function with its signature."""
    try:
        return f"{given!r} ({type(given).__name__} {inspect.signature(given)})"  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"{given!r} ({type(given).__name__})"


SWITCH = choice(True, False)  # noqa: FBT003 - the two values are the point
THREE_VALUED = choice(None, True, False)  # noqa: FBT003 - as SWITCH
CALLABLE = Kind(
    "None or a callable fn(gm, example_inputs, config)", lambda given: given is None or _takes_three_arguments(given)
)
TEXT = Kind("a str", lambda given: isinstance(given, str))
MAPPING = Kind("None or a dict", lambda given: given is None or isinstance(given, dict))
SWITCHES = Kind(
    "None or a dict of names to True or False",
    lambda given: (
        given is None
        or (isinstance(given, dict) and all(isinstance(k, str) and isinstance(v, bool) for k, v in given.items()))
    ),
)
POOL = Kind(
    "None or a pool handle: the pair of ints that torch.npu.graph_pool_handle() returns",
    lambda given: given is None or _is_pool_handle(given),
)


@dataclass(frozen=True)
class Option:
    """One row of the table.

    Attributes:
        name: The flat name, as in `torch.compile(..., options={name: value})`.
        kind: The legal values.
        default: The value if nobody says anything.
        meaning: One sentence for the documentation and `npugraph-ex options`.
        torchair: Where TorchAir's config object has it, dotted; empty if it has not.
        inverted: TorchAir's switch says the opposite (`disable_…`).
        honoured: The values that this version can do, None for every legal one; the others are refused, not ignored.
    """

    name: str
    kind: Kind
    default: object
    meaning: str
    torchair: str = ""
    inverted: bool = False
    honoured: tuple[object, ...] | None = None

    def check(self, value: object, *, said_as: str = "") -> None:
        """Refuse a value that is not legal, or legal and not possible yet.

        Args:
            value: What came.
            said_as: How the user spelt the option, if not by its flat name.

        Raises:
            OptionValueError: The value is not one of `kind`.
            OptionNotAvailableError: The value is legal and this version cannot do it.
        """
        name = said_as or self.name
        if not self.kind.accepts(value):
            raise OptionValueError(f"option {name!r} takes {self.kind.allowed}, got {_described(value)}")
        if self.honoured is not None and not any(value is known or value == known for known in self.honoured):
            honoured = " or ".join(repr(known) for known in self.honoured)
            raise OptionNotAvailableError(
                f"option {name!r} = {value!r} is not available yet; this version honours {honoured}. "
                "Leave the option out to compile without it"
            )


def unknown_option(name: object, known: Iterable[str], *, where: str = "") -> UnknownOptionError:
    """Build the error for a name that is not in the table: the name and the nearest right ones, and where all are."""
    names, last = sorted(known), str(name).rpartition(".")[2]
    near = [
        one
        for one in difflib.get_close_matches(str(name), names, n=3, cutoff=0.65)
        if difflib.get_close_matches(last, [one.rpartition(".")[2]], cutoff=0.65)  # a section alone is no likeness
    ]
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    if where:
        return UnknownOptionError(
            f"no option of {where} is named {name!r}; {hint.rstrip() or 'the names are: ' + ', '.join(names)}"
        )
    return UnknownOptionError(f"no option is named {name!r}; {hint}`npugraph-ex options` lists all")
