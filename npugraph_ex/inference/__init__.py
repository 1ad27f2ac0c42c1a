"""Compiling for inference: `session`, for calls without guards; `cache_compile` and `readable_cache`, for starts from disk."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from npugraph_ex.config import CompilerConfig
    from npugraph_ex.inference.decode_session import DecodeSession

__all__ = ["cache_compile", "readable_cache", "session"]


def session(
    model: Callable[..., Any],
    example_inputs: Sequence[Any],
    *,
    config: CompilerConfig | None = None,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
    debug: bool = False,
) -> DecodeSession:
    """Compile and capture a model ahead, for calls that check their arguments and replay: no guards, no cost by the layer.

    A session serves inference: make it and call it under ``torch.no_grad()`` or ``torch.inference_mode()``. Each call compares
    what may differ between calls: the arguments' number, types, numbers, dtypes, shapes, strides, devices and
    ``requires_grad``; the addresses of those that the model writes; the modes of the thread. A form of call that is new is
    compiled and captured when it comes. `DecodeSession.refresh` says when the model itself has changed. docs/how-to/sessions.md
    has the whole contract.

    Args:
        model: a module, a function or a method, before ``torch.compile``; the whole of it must be one graph that can be
            captured.
        example_inputs: the positional arguments of a first call, on the device. The model runs with them; what it writes is
            restored.
        config: the options as an object.
        options: options by flat name, on top of ``config``.
        dynamic: as in ``torch.compile``.
        debug: let torch.compile check everything at each call, and raise where a change was not told.

    Returns:
        A callable with the signature of ``model``.

    Raises:
        OptionError: a wrong option.
        SessionError: the model cannot be a session; says why and, as far as torch knows, where.
    """
    from npugraph_ex.inference.decode_session import DecodeSession

    return DecodeSession.compile(model, example_inputs, config=config, options=options, dynamic=dynamic, debug=debug)


def cache_compile(  # noqa: PLR0913 - the signature that TorchAir's users know
    func: Callable[..., Any],
    *,
    config: CompilerConfig | None = None,
    options: Mapping[str, object] | None = None,
    dynamic: bool = True,
    cache_dir: str | Path | None = None,
    global_rank: int | None = None,
    tp_rank: int | None = None,
    pp_rank: int | None = None,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    fullgraph: bool = True,
    ge_cache: bool = False,
) -> Callable[..., Any]:
    """Compile a method for inference, and keep the result on disk for the next process.

    The first call looks for a saved compilation; where none fits, it compiles and saves one. Later calls check the guards
    of what is there, on inputs and on globals, and compile again where none holds, so that a saved graph never runs for
    inputs that it was not made for. Results carry no gradient.

    Args:
        func: a method of a module, or a function; the whole of it must be one graph.
        config: the options as an object.
        options: options by flat name, on top of ``config``.
        dynamic: sizes are symbolic from the start; False: each combination of sizes is compiled anew.
        cache_dir: where to keep it; ``$NPUGRAPH_EX_CACHE``, or the user's cache folder, when None.
        global_rank: of this process; taken from torch.distributed, where that is initialised, when None.
        tp_rank: its rank in tensor parallelism, part of the name where given.
        pp_rank: likewise, in pipeline parallelism.
        custom_decompositions: as in ``get_npu_backend``.
        fullgraph: True is the only way; accepted because callers of ``torch.compile`` write it.
        ge_cache: for mode "max-autotune", which this backend does not run; ignored.

    Returns:
        A callable with the signature of ``func``.

    Raises:
        OptionError: a wrong option.
        NpuGraphExError: ``func`` is no function or method.
    """
    from npugraph_ex.inference.cached import CachedFunction

    del ge_cache
    ranks = {"world": global_rank, "tp": tp_rank, "pp": pp_rank}
    return CachedFunction.from_function(
        func,
        config=config,
        options=options,
        dynamic=dynamic,
        directory=cache_dir,
        given_ranks=ranks,
        decompositions=custom_decompositions,
        fullgraph=fullgraph,
    )


def readable_cache(
    cache_bin: str | Path,
    print_output: bool = True,  # noqa: FBT001, FBT002 - the signature that torch_npu forwards to
    file: str | Path | None = None,
) -> str:
    """Show a saved compilation: what it was made from and for, and its graph as Python.

    Args:
        cache_bin: a file of ``cache_dir``, as `npugraph-ex cache ls` lists them.
        print_output: print it.
        file: write it here too.

    Returns:
        The text.

    Raises:
        SavedGraphError: the file is damaged, foreign or another user's.
    """
    from npugraph_ex.inference.readable import describe

    text = describe(Path(cache_bin))
    if file is not None:
        Path(file).write_text(text, encoding="utf-8")
    if print_output:
        out: TextIO = sys.stdout
        out.write(text)
    return text
