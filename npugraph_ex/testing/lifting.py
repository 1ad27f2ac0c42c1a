"""Symbolic sizes without arithmetic on symbols: a graph is traced with a large prime for each, and its numbers are read.

With symbols, an operator's meta kernel takes a millisecond or more, because each product and comparison of sizes is computed
in Python. With numbers it takes a tenth of that. Sizes, strides and offsets of most programs are products of symbols and
small numbers, so that each can be read off its prime factors. A sum or a quotient has others, and is not lifted. Nor is a
result in which a symbol is lost, as it is where the smaller of a symbol and a number is taken: the prime is always larger.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.graph.operators import named_arguments

_PRIMES = {0: (), 1: (1_099_511_627_791,), 2: (8_388_593, 8_388_617)}
"""By how many symbols there are: as large as 64 bits allow, a tensor being as large as their product and more."""

_LARGEST = 100_000
"""What a number of a program hardly reaches, and neither a sum of primes nor a small part of one stays below."""


class UnliftableError(Exception):
    """The graph has a number that is no product of symbols and a small number, or a value that is no plain tensor."""


def primes(names: Collection[str]) -> dict[str, int]:
    """A size to trace with for each symbolic size of the inputs.

    Raises:
        UnliftableError: there are more of them than primes, or one is called a product, such as "s0*4", which has a symbol
            of its own.
    """
    if len(names) not in _PRIMES or not all(map(str.isidentifier, names)):
        raise UnliftableError
    return dict(zip(sorted(names), _PRIMES[len(names)], strict=True))


def run_liftable(
    run: Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any],
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What ``run`` returns for a call in which sizes are primes.

    Raises:
        UnliftableError: that is a number, with which the program would go on as one of its own, or as many tensors as a
            prime says, which would fill the memory.
    """
    if _cuts_a_symbol(func, args, kwargs):
        raise UnliftableError
    results = run(func, args, kwargs)
    if not all(leaf is None or isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(results)):
        raise UnliftableError
    return results


def _cuts_a_symbol(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the results are a list of parts of a tensor along a size that is a symbol."""
    if not any(isinstance(result.type, torch.ListType) for result in _torch_private.schema(func).returns):
        return False
    given = named_arguments(func, args, kwargs)
    whole = given.get("self")
    return isinstance(whole, torch.Tensor) and bool(whole.shape[given.get("dim", 0)] > _LARGEST)


@dataclass
class Numbers:
    """Numbers that were computed with primes, as what they are with symbols.

    Args:
        symbols: what each prime stands for.
    """

    symbols: Mapping[int, torch.SymInt]
    _factors: dict[int, tuple[int, ...]] = field(default_factory=dict)
    _lifted: dict[int, int | torch.SymInt] = field(default_factory=dict)

    def powers(self, number: int) -> tuple[int, ...]:
        """How often each prime is a factor of ``number``."""
        if number not in self._factors:
            self._factors[number] = tuple(_power(prime, number) for prime in self.symbols)
        return self._factors[number]

    def lifted(self, number: int) -> int | torch.SymInt:
        """The number with symbols in place of primes."""
        if number not in self._lifted:
            self._lifted[number] = self._product(number)
        return self._lifted[number]

    def _product(self, number: int) -> int | torch.SymInt:
        product: int | torch.SymInt = number
        for prime, power in zip(self.symbols, self.powers(number), strict=True):
            product = product // prime**power
        if product > _LARGEST:
            raise UnliftableError
        for symbol, power in zip(self.symbols.values(), self.powers(number), strict=True):
            for _ in range(power):
                product = product * symbol
        return product


def _power(prime: int, number: int) -> int:
    power = 0
    while number and number % prime == 0:
        number, power = number // prime, power + 1
    return power


class Lifting:
    """Gives the nodes of one graph tensors with symbolic sizes.

    Args:
        mode: the fake mode of the new tensors.
        numbers: of the symbols.
    """

    def __init__(self, mode: FakeTensorMode, numbers: Numbers) -> None:
        self._mode = mode
        self._numbers = numbers
        self._lifted: dict[int, torch.Tensor] = {}  # by the identity of the old tensor, which `lift` keeps alive
        self._owners: dict[int, torch.Tensor] = {}  # by storage

    def lift(self, graph: fx.Graph, inputs: Sequence[torch.Tensor]) -> None:
        """Replace what is known of every node; ``inputs`` are the new tensors of the placeholders.

        Raises:
            UnliftableError: it cannot be done; the graph is then half changed.
        """
        old = {node: node.meta["val"] for node in graph.nodes if "val" in node.meta}
        for node, new in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
            self._lifted[id(old[node])] = new
            self._owners.setdefault(_torch_private.storage_key(old[node]), new)
        for node, value in old.items():
            if node.op == "call_function" and node.target is not operator.getitem:
                self._check_arguments(node)
                self._check_symbols(value, [old[source] for source in node.all_input_nodes])
            node.meta["val"] = self._value(value)

    def _check_arguments(self, node: fx.Node) -> None:
        """No prime may have become an argument, as the size to which a written view is brought back would."""
        numbers = [leaf for leaf in pytree.arg_tree_leaves(*node.args, **node.kwargs) if isinstance(leaf, int)]
        if any(map(any, map(self._numbers.powers, numbers))):
            raise UnliftableError

    def _check_symbols(self, results: Any, sources: Any) -> None:
        """Every result must have the symbols of every argument, also one without elements."""
        result, source = self._powers(results), self._powers(sources)
        if not all(x >= y for kept in result for given in source for x, y in zip(kept, given, strict=True)):
            raise UnliftableError

    def _powers(self, values: Any) -> set[tuple[int, ...]]:
        tensors = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
        return {self._numbers.powers(math.prod(size or 1 for size in tensor.shape)) for tensor in tensors}

    def _value(self, old: Any) -> Any:
        if isinstance(old, (list, tuple)):
            return type(old)(self._value(item) for item in old)
        if old is None:
            return None
        if not isinstance(old, torch.Tensor):
            raise UnliftableError
        if id(old) not in self._lifted:
            self._lifted[id(old)] = self._tensor(old)
        return self._lifted[id(old)]

    def _tensor(self, old: torch.Tensor) -> torch.Tensor:
        if old.layout != torch.strided or old.is_conj() or old.is_neg():
            raise UnliftableError
        number = self._numbers.lifted
        shape, stride = [number(size) for size in old.shape], [number(step) for step in old.stride()]
        key = _torch_private.storage_key(old)
        owner = self._owners.get(key)
        if owner is not None and owner.dtype != old.dtype:
            raise UnliftableError
        with _torch_private.on_meta_tensors(self._mode):
            if owner is None:
                elements: Any = number(old.untyped_storage().nbytes() // old.element_size())
                owner = torch.empty(elements, dtype=old.dtype, device="meta")
            new = owner.as_strided(shape, stride, number(int(old.storage_offset())))
        fake = _torch_private.fake_of_meta(self._mode, new, old.device)
        self._owners.setdefault(key, fake)
        return fake
