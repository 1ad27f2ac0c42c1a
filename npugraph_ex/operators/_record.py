"""The record of one operator: all that the library knows of it, in one object, in the operator's own file.

``Operator(...)`` is a decorator for the operator's formula. The fields of a record are plain data and small functions. No
table elsewhere names the operator. Who reads which field:

================== ========================================================================================
formula            kernel on an emulated device, judge of the conformance suite, ``check_numerics``
before_rounding    judge: tells a tie from an error in an integer output
examples           opcheck and the comparison with the device library's meta function, in tests/operators
dtypes             each example runs in each of them and must agree with float64, in tests/operators; the table of operators
source             the table of operators in the documentation
beside_alike       fusion and lifting: what they must not put into a graph
absent_on          ``npugraph-ex advise --discover``: what it must not offer; the table of operators
constraints        emulated device: what it refuses at the launch, with its error code
synonyms           matching of arguments in fusion
canonical          matching of arguments in fusion
explain_unfused    the report's list of operators that no fusion rule came near
near_misses        generator of random programs that must not fuse
writes             alias analysis, in-place recovery, dead code, emulated device: what the schema leaves out
returns_written    emulated device: the results that are the written arguments
writes_by_index    stream check and the way back of functional writes: which bytes are written is known only on the device
host_arguments     update of captured graphs between replays
workspace          update of captured graphs between replays
first_factor       modelled clock: the price of a matrix product
work               modelled clock: the price of what is neither a matrix product nor one operation for each element
draws_random_...   emulated device: its generator moves on
across_ranks       emulated device: the kernel of an operator that communicates, see ``_ranks``
schema, fake       tests of rules about a client's operators, without the client
================== ========================================================================================

A formula, too, may raise ``refused(...)`` for a call that the device refuses. ``constraints`` is for what can be told from shapes,
dtypes and host values: it refuses before anything is launched, in a capture too.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from typing_extensions import Self

from npugraph_ex.operators._alike import Alike, before
from npugraph_ex.operators._covered_values import covering, shown_dtypes
from npugraph_ex.operators._precision import FLOATS, UnsupportedArgumentError, refused
from npugraph_ex.operators._products import PRODUCTS, product_of
from npugraph_ex.operators._ranks import Steps, alone
from npugraph_ex.operators._registry import OPERATORS, OperatorRecordError

Formula = TypeVar("Formula", bound=Callable[..., Any])
_OF_VENDOR = ("npu::", "atb::")
_NO_SMALL_FLOATS = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float64}
)
_ENTRIES: tuple[tuple[str, Callable[[object], bool], str], ...] = (
    ("examples", callable, "holds functions that make calls, as in (lambda: call(x),)"),
    ("dtypes", lambda value: isinstance(value, torch.dtype), "holds dtypes of torch, as in (torch.float16,)"),
    ("absent_on", lambda value: value in PRODUCTS, f"holds names of products: {', '.join(PRODUCTS)}"),
)
"""What the entries of tuples are."""
Canonical = Callable[[int, Mapping[str, Any]], Mapping[str, Any]]
"""Takes the rank of the first tensor and a call's arguments by name; returns them in the one spelling that stands for all."""


class Work(NamedTuple):
    """How much arithmetic one call is, for the modelled clock; bytes are counted by the clock itself.

    Attributes:
        products: operations of matrix products, two for each multiplication and addition: ``2 * m * n * k``.
        elements: single operations on elements by the vector cores.
    """

    products: float = 0.0
    elements: float = 0.0


class Call(NamedTuple):
    """The arguments of one call of an operator."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def call(*args: Any, **kwargs: Any) -> Call:
    """An example call: ``call(x, dim=1)`` for ``operator(x, dim=1)``, with tensors on the CPU."""
    return Call(args, kwargs)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operator:
    """What is known of one operator. Used as a decorator, it adds the record with the decorated function as its formula.

    Attributes:
        name: ``"namespace::operator"`` for the default overload, ``"namespace::operator.overload"`` for another one.
        formula: what the operator computes, in plain ATen on CPU tensors, with exactly the schema's signature. None where only
            other fields are known; such a record is added with ``OPERATORS.add``. Of an operator that communicates it is a
            generator function (see ``_ranks``); the field then holds what the operator computes where every rank gives the same.
        source: where the formula is from: a public document or published source.
        absent_on: products on which there is no such operator, by the table of products in the document of ``source``; empty
            where the document says of none that it has no such operator.
        dtypes: those that the document lists for the first floating-point tensor of an example, or for its first tensor where
            none is floating. All tensors of an example that have that tensor's dtype change together.
        floats_only: whether the document lists no other dtypes than small floats and float32, so that the device refuses
            integers and float64 where the examples have floats.
        examples: functions without arguments that make calls, at least one where there is a formula. They may draw random
            numbers as they like: ``calls`` gives each the same state and restores the generator.
        before_rounding: for integer outputs, the formula with the floating-point quotients in place of rounded outputs.
        synonyms: for each argument that names a dtype by its code or has other values that mean the same: written value -> the
            value that it equals, for example ``{"dst_type": {1: None}}`` where int8 (code 1) is the default.
        canonical: for arguments whose meaning depends on others: takes the first tensor's rank and all effective arguments by
            name, and returns those that have several spellings, in the one spelling that comparisons use.
        explain_unfused: whether a report says why no rule fused it.
        near_misses: values of arguments, other than fusion patterns have, that change the result. A keyword-only argument is one
            that patterns leave out; another one says which dimension.
        writes: arguments that the operator writes, and returns, though its schema does not mark them.
        returns_written: the results that are those arguments themselves: their positions, in the order of ``writes``.
        writes_by_index: whether the operator, or its functional twin, changes elements of its first argument that only index
            tensors tell.
        host_arguments: arguments that a replay may change: whole numbers, lists of them, or tensors on the CPU.
        workspace: the operator that allocates memory large enough for every value of the host arguments.
        covers: for arguments that matter in some calls only, the values that the formula knows; another one is refused by name.
        constraints: takes the formula's arguments and raises ``refused(...)`` for a call that the device refuses. Tensors may be
            on the device: it looks at shapes, strides, dtypes and host values, never at elements.
        beside_alike: the constraints without those of ``alike``; the decorator fills it in.
        alike: the arguments that the device takes only in one shape, and those that it takes only in one dtype, as
            ``Alike(shape=("x1", "x2"))``. Both the formula and ``constraints`` refuse others.
        first_factor: for a matrix product, the position of its first factor among the tensors that it reads.
        work: takes the formula's arguments, tensors as in ``constraints``, and gives the ``Work`` of the call.
        draws_random_numbers: for a formula that takes numbers from torch's generator: whether a call with these arguments does.
        across_ranks: the generator function that became such a record's formula.
        schema: for an operator that a client's library defines, its arguments and results as ``torch.library`` takes them.
        fake: likewise, its fake implementation.

    Raises:
        OperatorRecordError: a field does not fit; the message names the operator and the field.
    """

    name: str
    formula: Callable[..., Any] | None = None
    source: str = ""
    absent_on: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    floats_only: bool = False
    examples: tuple[Callable[[], Call], ...] = ()
    before_rounding: Callable[..., Any] | None = None
    synonyms: Mapping[str, Mapping[int, int | None]] = field(default_factory=dict)
    canonical: Canonical | None = None
    explain_unfused: bool = False
    near_misses: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    returns_written: tuple[int, ...] = ()
    writes_by_index: bool = False
    host_arguments: tuple[str, ...] = ()
    workspace: str = ""
    covers: Mapping[str, Collection[object]] = field(default_factory=dict)
    constraints: Callable[..., None] | None = None
    beside_alike: Callable[..., None] | None = field(default=None, repr=False)
    alike: Alike = field(default_factory=Alike)
    first_factor: int | None = None
    work: Callable[..., Work] | None = None
    draws_random_numbers: Callable[..., bool] | None = None
    across_ranks: Callable[..., Steps] | None = None
    schema: str = ""
    fake: Callable[..., Any] | None = None

    if not TYPE_CHECKING:  # type checkers know the fields from the class

        def __new__(cls, *given: object, **fields: object) -> Self:
            """Refuse what is no field before the generated ``__init__`` does, and name the nearest one."""
            known = [one.name for one in dataclasses.fields(cls)]
            for name in (name for name in fields if name not in known):
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise OperatorRecordError(f"Operator has no field {name!r}; {hint}it has {', '.join(known)}.")
            if given or (fields and "name" not in fields):
                raise OperatorRecordError(
                    "Operator takes fields by name, its own among them: Operator(name='npu::…', …)."
                )
            return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check what can be checked without the operator itself."""
        if not re.fullmatch(r"\w+::\w+(\.\w+)?", self.name) or self.name.endswith(".default"):
            raise self._wrong("name", "is 'namespace::operator', or 'namespace::operator.overload'", self.name)
        for name in ("examples", "writes", "host_arguments", "dtypes", "absent_on"):
            if not isinstance(getattr(self, name), tuple):
                raise self._wrong(name, "is a tuple; a single entry is written (entry,)", getattr(self, name))
        for name, fits, expected in _ENTRIES:
            wrong = [value for value in getattr(self, name) if not fits(value)]
            if wrong:
                raise self._wrong(name, expected, wrong[0])
        if len(self.returns_written) > len(self.writes):
            raise self._wrong("returns_written", "has at most one position for each of writes", self.returns_written)
        if self.workspace and not self.host_arguments:
            raise self._wrong("workspace", "goes with host_arguments; name those too", self.workspace)
        if bool(self.schema) != (self.fake is not None):
            raise self._wrong("schema", "and fake go together; give both or none", self.schema)
        if self.formula is not None:
            self._check_formula(self.formula)

    def __call__(self, formula: Formula) -> Formula:
        """Add the record with ``formula``, and return the function as it is."""
        if self.formula is not None:
            raise self._wrong("formula", "is the decorated function; leave the field out", self.formula)
        if not self.examples:
            raise self._wrong("examples", "needs a call that checks can run, as in (lambda: call(x),)", self.examples)
        record = dataclasses.replace(self, beside_alike=self.constraints)
        if any(self.alike):
            check, own = self.alike.checking(self.name, formula), self.constraints
            record = dataclasses.replace(self, constraints=before(check, own) if own else check, beside_alike=own)
        if inspect.isgeneratorfunction(formula):
            OPERATORS.add(dataclasses.replace(record, formula=alone(formula), across_ranks=formula))
            return formula
        guarded: Callable[..., Any] = before(check, formula) if any(self.alike) else formula
        record = dataclasses.replace(record, formula=guarded)
        if self.covers or self.is_vendors:
            record = dataclasses.replace(
                record, formula=covering(self.name, self.covers, guarded, record.shown_arguments)
            )
        OPERATORS.add(record)
        return formula

    def _check_formula(self, formula: Callable[..., Any]) -> None:
        """The names in other fields are arguments of the formula, and its twin has the same ones."""
        known = inspect.signature(formula).parameters
        named = {
            name: getattr(self, name) for name in ("writes", "host_arguments", "synonyms", "near_misses", "covers")
        }
        for name, arguments in (*named.items(), ("alike", (*self.alike.shape, *self.alike.dtype, *self.alike.besides))):
            for argument in arguments:
                if argument not in known:
                    raise self._wrong(name, f"names arguments of the operator ({', '.join(known)})", argument)
        for name in ("before_rounding", "constraints", "work"):
            twin = getattr(self, name)
            if twin is not None and [*inspect.signature(twin).parameters] != [*known]:
                raise self._wrong(name, f"takes the arguments of the formula ({', '.join(known)})", twin)

    def _wrong(self, name: str, expected: str, value: object) -> OperatorRecordError:
        return OperatorRecordError(f"Operator {self.name!r}, field {name}: it {expected}; it is {value!r}.")

    @property
    def overload(self) -> torch._ops.OpOverload | None:
        """The operator itself; None where the library that defines it is not loaded."""
        namespace, _, rest = self.name.partition("::")
        operator, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, namespace), operator, None)
        return getattr(packet, overload or "default", None)

    def is_on(self, device: str) -> bool:
        """Whether the device of this name, as ``torch.npu.get_device_name`` gives it, may have the operator: see ``absent_on``."""
        return product_of(device) not in self.absent_on

    def is_surely_on(self, device: str) -> bool:
        """Whether the device of this name is a product that has the operator: not one of which ``absent_on`` knows nothing."""
        return product_of(device) is not None and self.is_on(device)

    @property
    def is_vendors(self) -> bool:
        """Whether torch_npu defines the operator."""
        return self.name.startswith(_OF_VENDOR)

    @property
    def defined_at(self) -> str:
        """The function that the record was made from; all fields where it has none."""
        return f"{self.formula.__module__}.{self.formula.__qualname__}" if self.formula else repr(self)

    def shown_arguments(self) -> Iterator[dict[str, object]]:
        """The arguments of the example calls by name, in each of the dtypes."""
        names = [*inspect.signature(self.formula).parameters] if self.formula else []
        for args, kwargs in self.calls():
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            yield given
            tensors = {name: value.dtype for name, value in given.items() if isinstance(value, torch.Tensor)}
            if not tensors:  # lists of them
                continue
            before = next((dtype for dtype in tensors.values() if dtype.is_floating_point), *[*tensors.values()][:1])
            for dtype in self.dtypes:  # those of one dtype change together
                yield {name: torch.empty(0, dtype=dtype) for name in tensors if tensors[name] == before}

    @functools.cached_property
    def _parameters(self) -> tuple[str, ...]:
        """Of the formula."""
        return tuple(inspect.signature(self.formula).parameters) if self.formula else ()

    @functools.cached_property
    def _floats(self) -> frozenset[str]:
        """The arguments that are small floats or float32 in all examples."""
        seen = shown_dtypes(self.shown_arguments())
        return frozenset(name for name, dtypes in seen.items() if dtypes <= {*FLOATS})

    def refuse_on_device(self, *args: object, **kwargs: object) -> None:
        """``constraints``, and what the formula computes for a judge, and the device refuses: see ``floats_only``."""
        given = (*zip(self._parameters, args, strict=False), *kwargs.items()) if self.floats_only else ()
        for name, value in given:
            if isinstance(value, torch.Tensor) and value.dtype in _NO_SMALL_FLOATS and name in self._floats:
                operator = self.name.partition("::")[2].partition(".")[0]
                raise refused(operator, name, value.dtype, " or ".join(map(str, self.dtypes)))
        if self.constraints is not None:
            self.constraints(*args, **kwargs)

    def calls(self) -> list[Call]:
        """The example calls, the same ones each time. torch's generators are as they were afterwards."""
        made = []
        for example in self.examples:
            with torch.random.fork_rng(devices=()):
                torch.default_generator.manual_seed(0)
                made.append(example())
        return made


def record_of(target: object) -> Operator | None:
    """The record of the overload that a graph's node calls, else of the operator; None for any other target, or where none is."""
    if not isinstance(target, torch._ops.OpOverload):
        return None
    return OPERATORS.get(target.name()) or OPERATORS.get(target._schema.name)


def formula_of(target: object) -> Callable[..., Any] | None:
    """The formula of the overload that a graph's node calls; None where there is none.

    That of an operator that communicates raises ``UnsupportedArgumentError``: one process does not know what the others give.
    """
    record = OPERATORS.get(target.name()) if isinstance(target, torch._ops.OpOverload) else None
    if record is None:
        return None
    return record.formula if record.across_ranks is None else functools.partial(_needs_other_ranks, record.name)


def _needs_other_ranks(name: str, *args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise UnsupportedArgumentError(
        f"{name} communicates: what it computes depends on the other ranks; run it on the device."
    )
