"""All records of operators by name, and who is told of a new one. What a record is: ``_record``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from npugraph_ex.errors import AddressedError

if TYPE_CHECKING:
    from npugraph_ex.operators._record import Operator

Listener = Callable[[str, "Operator"], None]


class OperatorRecordError(AddressedError, ValueError):
    """A record of an operator is wrong, or two records have one name; the message names the operator and the field."""


class Operators(Mapping[str, "Operator"]):
    """Records by operator name, such as ``"npu::npu_rms_norm"``. Only ``add`` changes it."""

    def __init__(self) -> None:
        self._records: dict[str, Operator] = {}
        self._listeners: list[Listener] = []

    def __getitem__(self, name: str) -> Operator:
        """The record of ``name``."""
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        """All names, in the order in which the records came."""
        return iter(self._records)

    def __len__(self) -> int:
        """How many operators have a record."""
        return len(self._records)

    def add(self, record: Operator) -> None:
        """Add a record. The same definition, executed again (a reload, a notebook's cell), replaces its former record.

        Raises:
            OperatorRecordError: another definition has the name.
        """
        known = self._records.get(record.name)
        if known is not None and known.defined_at != record.defined_at:
            raise OperatorRecordError(
                f"Operator {record.name!r}, field name: it has a record already, {known.defined_at}; "
                f"{record.defined_at} is a second one. Remove one of them."
            )
        self._records[record.name] = record
        for listener in self._listeners:
            listener(record.name, record)

    def listen(self, listener: Listener) -> None:
        """Call ``listener(name, record)`` for each record added from now on."""
        self._listeners.append(listener)


OPERATORS = Operators()
"""The records that this process knows, the library's own and the user's."""
