"""The known-bug corpus: faults that shipped systems had, each as a small program that shows it, with its public thread.

Each names the mutant that brings the fault back into this library. With it the program must fail, without it pass; and
random programs of the mutant's family must find it too.
"""

from __future__ import annotations

from npugraph_ex.testing.generator.inputs import Input
from npugraph_ex.testing.oracle.case import Case
from npugraph_ex_conformance.corpus.known_bug import KnownBug

_PYTORCH = "https://github.com/pytorch/pytorch/issues/"
_VLLM = "https://github.com/vllm-project/vllm/issues/"
_ASCEND = "https://github.com/vllm-project/vllm-ascend/issues/"


def _case(source: str, *inputs: Input, route: str = "fx", functional: bool = True, **fields: object) -> Case:
    body = "\n".join(f"    {line.strip()}" for line in source.strip().splitlines())
    names = ", ".join(f"x{position}" for position in range(len(inputs)))
    text = f"def program({names}):\n{body}\n".replace("aten.", "torch.ops.aten.").replace("npu.", "torch.ops.npu.")
    return Case(text, inputs, route=route, functional=functional, **fields)  # type: ignore[arg-type]


def _integers(*shape: int | str) -> Input:
    return Input(shape, "int32")


_ROWS = (Input((3, 64), seed=1), Input((3, 64), seed=2), Input((64,), seed=3))
_WIDE = tuple(Input(spec.shape, "float32", seed=spec.seed) for spec in _ROWS)
_PAIR = """
    y, _, total = npu.npu_add_rms_norm.default(x0, x1, x2)
    q, scale = npu.npu_dynamic_quant.default(y{})
    return (q, scale, total{})
"""

CORPUS: tuple[KnownBug, ...] = (
    KnownBug(
        "no-op removal moves a read past a write",
        f"{_PYTORCH}198131",
        "noop-removal-ignores-writes",
        _case(
            """
            v0 = aten.neg.default(x0)
            v1 = aten.clone.default(v0)
            aten.add_.Tensor(v0, 5)
            v2 = aten.neg.default(v1)
            v3 = aten.neg.default(v0)
            return (v2, v3)
            """,
            _integers(2, 4), functional=False,
        ),
    ),
    KnownBug(
        "a write-back overwrites an input that is read later, for example when two inputs are swapped",
        f"{_PYTORCH}94693",
        "reinplace-ignores-later-reads",
        _case(
            """
            v0 = aten.neg.default(x0)
            v1 = aten.neg.default(x1)
            aten.copy_.default(x1, v0)
            aten.copy_.default(x0, v1)
            return (v0,)
            """,
            _integers(2, 4), _integers(2, 4),
        ),
    ),
    KnownBug(
        "two results are written to the memory of one value",
        f"{_PYTORCH}132196",
        "reinplace-ignores-later-reads",
        _case(
            """
            v0 = aten.neg.default(x0)
            v1 = aten.add.Tensor(v0, x1)
            v2 = aten.sub.Tensor(v0, x1)
            return (v1, v2)
            """,
            _integers(2, 4), _integers(2, 4),
        ),
    ),
    KnownBug(
        "a scatter is folded into an input that a later write overwrites",
        f"{_PYTORCH}198096",
        "reinplace-ignores-later-writes",
        _case(
            """
            v0 = aten.neg.default(x0)
            v1 = aten.slice_scatter.default(x0, x1, -1, 0, 2)
            aten.copy_.default(x0, v0)
            v2 = aten.neg.default(v1)
            return (v2,)
            """,
            _integers(2, 4), _integers(2, 2), functional=False,
        ),
    ),
    KnownBug(
        "an operator reads the storage that it overwrites",
        f"{_PYTORCH}198260",
        "reinplace-ignores-overlap",
        _case(
            """
            v0 = aten.neg.default(x0)
            v1 = aten.transpose.int(v0, 0, 1)
            v2 = aten.sub.Tensor(v0, v1)
            v3 = aten.abs.default(v2)
            return (v3,)
            """,
            _integers(4, 4),
        ),
    ),
    KnownBug(
        "an operator works in place if the number of elements fits, whatever the shape",
        f"{_PYTORCH}186328",
        "reinplace-ignores-layout",
        _case(
            """
            v0 = aten.neg.default(x1)
            v1 = aten.add.Tensor(v0, x0)
            return (v1,)
            """,
            _integers(2, 4), _integers(4),
        ),
    ),
    KnownBug(
        "keyword arguments that the pattern does not name are dropped",
        f"{_ASCEND}11776",
        "matcher-ignores-constants",
        _case(_PAIR.format(", dst_type_max=64.0", ""), *_ROWS, expected=0, runs=False),
    ),
    KnownBug(
        "a fused operator is given a dtype that it does not take",
        f"{_VLLM}48330",
        "fusion-ignores-dtypes",
        _case(_PAIR.format("", ""), *_WIDE, expected=0),
    ),
    KnownBug(
        "results of a replacement with several outputs are mixed up",
        f"{_PYTORCH}137280",
        "fusion-shifts-results",
        _case(_PAIR.format("", ""), *_ROWS, expected=1),
    ),
    KnownBug(
        "a replacement is inserted before an input that is defined late",
        f"{_PYTORCH}162019",
        "fusion-inserts-too-early",
        _case("x1 = aten.silu.default(x1)\n" + _PAIR.format("", ""), *_ROWS, expected=1),
    ),
    KnownBug(
        "a pattern silently stops matching",
        f"{_ASCEND}6620",
        "fusion-never-matches",
        _case(_PAIR.format("", ""), *_ROWS, expected=1),
    ),
    KnownBug(
        "a pattern with an output that nobody uses does not match",
        f"{_ASCEND}12760",
        "fusion-hides-outputs",
        _case(_PAIR.format("", "").replace(", total)", ")"), *_ROWS, expected=1),
    ),
    KnownBug(
        "a value that fusion removes had another user",
        f"{_PYTORCH}195320",
        "fusion-ignores-other-users",
        _case(_PAIR.format("", ", y"), *_ROWS, expected=0),
    ),
    KnownBug(
        "a write between the matched operators is ignored",
        f"{_PYTORCH}149879",
        "fusion-ignores-writes-between",
        _case(
            _PAIR.format("", "").replace("q, scale =", "aten.mul_.Tensor(x0, 0.5)\nq, scale ="),
            *_ROWS, expected=0, functional=False,
        ),
    ),
    KnownBug(
        "a replacement changes the dtype of promoted operands",
        f"{_VLLM}44694",
        "fusion-ignores-metadata", example=2, family="user rules",
    ),
    KnownBug(
        "a pattern written for flatten accepts other reshapes",
        f"{_PYTORCH}195320",
        "fusion-ignores-metadata", example=3, family="user rules",
    ),
    KnownBug(
        "a pattern written for one transposition accepts others",
        f"{_PYTORCH}195320",
        "matcher-ignores-constants",
        _case(
            """
            product = aten.matmul.default(x0, x1)
            turned = aten.permute.default(product, [1, 2, 0])
            dense = aten.clone.default(turned, memory_format=torch.contiguous_format)
            return (dense,)
            """,
            Input((128, 2, 128), seed=1), Input((128, 128, 128), seed=2), expected=0,
        ),
    ),
    KnownBug(
        "the second model to register a rule raises",
        f"{_ASCEND}6513", "registration-refuses-duplicates", example=0,
    ),
    KnownBug(
        "a fused operator that is missing stops the program",
        f"{_ASCEND}6578", "registration-needs-every-operator", example=1,
    ),
    KnownBug(
        "a result is overwritten by the next replay",
        f"{_PYTORCH}148439",
        "replay-overwrites-results",
        _case("v0 = aten.neg.default(x0)\nreturn (v0,)", _integers(2, 4), route="graph"),
    ),
    KnownBug(
        "a graph is replayed with the address of an input that has moved",
        f"{_VLLM}53915",
        "replay-ignores-addresses",
        _case(
            "aten.add_.Tensor(x0, 1)\nreturn (x0,)", _integers(2, 4),
            route="graph", functional=False,
        ),
    ),
    KnownBug(
        "a captured graph is replayed for another shape",
        f"{_ASCEND}9744",
        "replay-ignores-sizes",
        _case(
            "v0 = aten.neg.default(x0)\nreturn (v0,)", _integers("s0", 4),
            route="graph", dynamic=True, sizes=({"s0": 5}, {"s0": 3}, {"s0": 5}, {"s0": 3}),
        ),
    ),
    KnownBug(
        "an input is written back after the streams were joined",
        f"{_PYTORCH}197416", "closure-joins-after-write-back", example=2,
    ),
    KnownBug(
        "memory freed on one stream is reused while another reads it",
        "https://github.com/meta-pytorch/torchrec/pull/4218", "lifetimes-are-not-lengthened", example=21,
    ),
    KnownBug(
        "a replacement loses the stream of its operators",
        f"{_PYTORCH}189095", "scopes-lose-their-stream", example=0,
    ),
    KnownBug(
        "a wait for a stream has no tensor arguments and moves to where it orders nothing",
        f"{_PYTORCH}185546", "native-wait-stream-orders-nothing", example=2,
    ),
    KnownBug(
        "a wait for an event stands before its record, and waits for nothing",
        f"{_ASCEND}8636", "waits-before-records-go-unsaid", example=0,
    ),
    KnownBug(
        "a stream is not joined when the capture ends",
        f"{_ASCEND}13792", "closure-does-not-join", example=1,
    ),
    KnownBug(
        "a replay uses the host arguments of the replay before it",
        f"{_ASCEND}4233", "update-never-happens", example=0,
    ),
    KnownBug(
        "one list of updates serves all graphs, in place of one list for each graph",
        f"{_ASCEND}13058", "update-lists-are-shared", example=1,
    ),
    KnownBug(
        "random numbers are frozen at capture",
        f"{_PYTORCH}84614", "replay-draws-the-same-numbers", example=0,
    ),
    KnownBug(
        "the cache returns a compilation with other options",
        f"{_ASCEND}9744", "cache-key-ignores-options", example=0,
    ),
    KnownBug(
        "the cache returns a compilation with other rules",
        f"{_VLLM}21430", "cache-key-ignores-rules", example=1,
    ),
)  # fmt: skip
"""From the classes of traps that the project knows of."""
