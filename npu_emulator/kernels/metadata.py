"""The metadata of an operator's outputs, from the meta kernel and cached by the metadata of the arguments."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from npu_emulator.kernels.registry import BY_PROGRAMS, DRAWS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

__all__ = ["Given", "Like", "Likes", "MetadataCache", "on_meta"]

_CACHE_LIMIT = 4096
_aten = torch.ops.aten
_ONE_DTYPE = {
    **dict.fromkeys(
        (
            _aten.mm.default,
            _aten.bmm.default,
            _aten.mv.default,
            _aten.dot.default,
            _aten.matmul.default,
            _aten.linear.default,
        ),
        (0, 1),
    ),
    **dict.fromkeys((_aten.addmm.default, _aten.baddbmm.default, _aten.addmv.default), (1, 2)),
    **dict.fromkeys(
        (_aten.put.default, _aten.put_.default, _aten.masked_scatter.default, _aten.masked_scatter_.default), (0, 2)
    ),
    **dict.fromkeys(
        (
            *(_aten.index_copy.default, _aten.index_copy_.default, _aten.index_add.default, _aten.index_add_.default),
            *(_aten.scatter.src, _aten.scatter_.src, _aten.scatter_add.default, _aten.scatter_add_.default),
        ),
        (0, 3),
    ),
}
"""The places of arguments of one dtype, which torch's meta kernels do not ask; a launch has to, or it would fail later."""


class Like(NamedTuple):
    """Shape (elements), strides (elements) and dtype of one output tensor."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Given:
    """An output that is an argument itself: number `leaf` of the leaves of `(args, kwargs)`."""

    leaf: int


class Likes:
    """The outputs of an operator that returns one tensor or a tuple of tensors, as nearly every operator does."""

    __slots__ = ("confirmed", "each", "single")

    def __init__(self, each: tuple[Like, ...], *, single: bool) -> None:
        """Describe the outputs in order; `single` says that the operator returns a tensor and no tuple."""
        self.each = each
        self.single = single
        self.confirmed = False
        """Whether a run has shown that the CPU's results have these sizes, so that later runs need no check."""


def on_meta(value: object) -> object:
    """Return the meta twin of a tensor, `meta` for a device, and anything else as it is."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    return torch.device("meta") if isinstance(value, torch.device) else value


def _on_host(value: object) -> object:
    """Like an argument on the meta device, with zeros for values.

    A kernel refuses sizes and dtypes in other words than a meta function in Python, of which some fail where they should refuse.
    """
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value, device="cpu")
    return torch.device("cpu") if isinstance(value, torch.device) else value


class MetadataCache:
    """Output metadata of one operator overload, by the metadata of its arguments."""

    def __init__(self, op: OpOverload, compute: Callable[..., Any] | None = None) -> None:
        """Serve the overload `op`; `compute` runs on meta tensors if `op` has no meta kernel."""
        self._op = op
        self._compute = compute
        self._is_formula = compute is not None and not any(compute is kernel for kernel in BY_PROGRAMS)
        self._writes = op._schema.is_mutable
        self._of_one_dtype = _ONE_DTYPE.get(op)
        self._known: dict[Any, Any] = {}
        self._default_dtype: torch.dtype | None = None
        """The one with which all that is known was found: a factory and a division of integers give it."""

    def outputs(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the outputs as `Likes`, or, if lists or arguments are among them, with `Like` or `Given` for every tensor.

        `key` describes the arguments (see `Bound.key`); None means that nothing may be cached. Errors of the meta kernel pass
        through: wrong arguments fail here, at launch, as they do on hardware.
        """
        if self._default_dtype is not (default := torch.get_default_dtype()):
            self._known.clear()
            self._default_dtype = default
        found = self._known.get(key) if key is not None else None
        if found is None:
            self.refuse_two_dtypes(args)
            found = tree_map(_like, self._on_meta(tree_map(on_meta, args), tree_map(on_meta, kwargs)))
            if type(found) is Like:
                found = Likes((found,), single=True)
            elif type(found) is tuple and all(type(like) is Like for like in found):
                found = Likes(found, single=False)
            if key is not None:
                if len(self._known) >= _CACHE_LIMIT:
                    self._known.clear()
                self._known[key] = found
        return found

    def refuse_two_dtypes(self, args: Sequence[Any]) -> None:
        """Raise where two arguments that must have one dtype have two."""
        if self._of_one_dtype is None:
            return
        one, other = self._of_one_dtype
        if args[one].dtype != args[other].dtype:
            names = [self._op._schema.arguments[place].name for place in (one, other)]
            raise RuntimeError(
                f"{self._op}: {' and '.join(names)} must have the same dtype; they are {args[one].dtype} and {args[other].dtype}"
            )

    def _on_meta(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the record's formula on meta tensors; the meta kernel if the formula fails, writes, draws or returns arguments.

        In eager mode on hardware no meta kernel of torch_npu runs, and some of them refuse arguments of their own schema or
        return other metadata.
        """
        if self._compute is not None and self._is_formula and not self._writes and not self._draws(args, kwargs):
            with contextlib.suppress(Exception):  # a kernel that looks at values cannot run on meta tensors
                result = self._compute(*args, **kwargs)
                given = {id(leaf) for leaf in tree_leaves((args, kwargs))}
                if not any(id(leaf) in given for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)):
                    return result
        try:
            result = self._op(*args, **kwargs)
        except (NotImplementedError, TypeError, NameError):  # none, or one with a mistake
            if self._compute is None:
                raise
        except (IndexError, ValueError, AssertionError, ArithmeticError) as error:
            if self._compute is not None:
                raise
            self._op(*tree_map(_on_host, args), **tree_map(_on_host, kwargs))  # refuses in its own words
            raise NotImplementedError(
                f"the meta function of {self._op} refuses what its kernel takes: {error}"
            ) from error
        else:
            return self._with_arguments(result, args, kwargs)
        try:
            result = self._compute(*args, **kwargs)
            return result if self._writes else self._with_arguments(result, args, kwargs)
        except Exception as error:
            if hasattr(error, "code"):  # the formula refuses the call
                raise
            raise NotImplementedError(
                f"{self._op} has no meta (fake) implementation, and its kernel cannot stand in for one: {error}"
            ) from error

    def _draws(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        draws = getattr(self._compute, DRAWS, None)
        return draws is not None and bool(draws(*args, **kwargs))

    def _with_arguments(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Put a `Given` for each output that is an argument, if both the meta kernel and `compute` return it."""
        leaves = tree_leaves((args, kwargs))
        places = {id(leaf): place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}
        if self._compute is None or not any(id(leaf) in places for leaf in tree_leaves(result)):
            return result
        try:
            returned = {id(leaf) for leaf in tree_leaves(self._compute(*args, **kwargs))}
        except Exception:  # noqa: BLE001 - a kernel may look at values, which meta tensors have not
            return result
        return tree_map(lambda leaf: Given(places[id(leaf)]) if id(leaf) in returned & {*places} else leaf, result)


def _like(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return Like(tuple(value.size()), tuple(value.stride()), value.dtype)
    return value
