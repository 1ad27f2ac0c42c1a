"""Draws a program, given as its Python text, as a graph: inputs on top, one row a depth, results at the bottom."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from html import escape

from npu_emulator.pages import framed

_PLANTED = re.compile(r"p\d+_")
_CHARACTER, _HEIGHT, _GAP, _ROW = 7.2, 26, 14, 58
_MARGIN = 10


@dataclass
class _Box:
    """One call or input: its place is the centre of the box."""

    label: str
    kind: str
    sources: list[_Box] = field(default_factory=list)
    row: int = 0
    x: float = 0.0

    @property
    def width(self) -> float:
        return len(self.label) * _CHARACTER + 16

    @property
    def y(self) -> float:
        return _MARGIN + _HEIGHT / 2 + self.row * _ROW


def draw_program(source: str) -> str:
    """The SVG of a program.

    Args:
        source: the text of one function of tensors, a line for each operator, as ``Program.source`` renders it. Calls
            whose results are called ``p0_...`` are a planted pattern's and are drawn as such. What stands in a scope
            says its stream; scopes and events themselves are not drawn.
    """
    boxes = _boxes(source)
    width = _place(boxes)
    height = max((box.y for box in boxes), default=0) + _HEIGHT / 2 + _MARGIN
    edges = [_edge(origin, box) for box in boxes for origin in box.sources]
    return framed("graph", "graph of a program", width, height, [*edges, *map(_drawn, boxes)])


def _boxes(source: str) -> list[_Box]:
    (function,) = ast.parse(source).body
    if not isinstance(function, ast.FunctionDef):
        raise TypeError("draw_program takes the text of one function.")
    known = {argument.arg: _Box(argument.arg, "input") for argument in function.args.args}
    boxes, streams = list(known.values()), list[str]()
    for statement in function.body:
        call, results = _call_of(statement)
        if call is None or _is_of_streams(call, streams):
            continue
        planted = any(_PLANTED.match(name) for name in results)
        read = [known[name] for name in _names(call) if name in known]
        box = _Box(_label(call) + "".join(streams[-1:]), "planted" if planted else "operator", _once(read))
        box.row = 1 + max((origin.row for origin in box.sources), default=0)
        boxes.append(box)
        known |= dict.fromkeys(results, box)
        if not results and box.sources:  # written in place: what reads the value later comes after the write
            written = next(name for name in _names(call) if name in known)
            known[written] = box
    returned = function.body[-1]
    if isinstance(returned, ast.Return) and returned.value is not None:
        read = [known[name] for name in _names(returned.value) if name in known]
        boxes.append(_Box("results", "result", _once(read), 1 + max((box.row for box in boxes), default=0)))
    return boxes


def _is_of_streams(call: ast.Call, streams: list[str]) -> bool:
    """Whether a call is a scope or an event; the open scopes' streams are noted."""
    name = _label(call)
    if name == "npugraph_ex.scope_enter":
        streams.append(f" on {ast.literal_eval(call.args[1])[0]}")
    elif name == "npugraph_ex.scope_exit" and streams:
        streams.pop()
    return name.startswith("npugraph_ex.")


def _once(boxes: list[_Box]) -> list[_Box]:
    return list({id(box): box for box in boxes}.values())


def _call_of(statement: ast.stmt) -> tuple[ast.Call | None, list[str]]:
    """The call of a statement and the names that its results get."""
    value = statement.value if isinstance(statement, (ast.Assign, ast.Expr)) else None
    if not isinstance(value, ast.Call):
        return None, []
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return value, [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _names(node: ast.AST) -> list[str]:
    return [child.id for child in ast.walk(node) if isinstance(child, ast.Name)]


def _label(call: ast.Call) -> str:
    return ast.unparse(call.func).removeprefix("torch.ops.").removeprefix("aten.").removesuffix(".default")


def _place(boxes: list[_Box]) -> float:
    """Give every box its place in its row, near what it reads; the width of the drawing."""
    rows: dict[int, list[_Box]] = {}
    for box in boxes:
        rows.setdefault(box.row, []).append(box)
    widths = {row: sum(box.width + _GAP for box in members) for row, members in rows.items()}
    total = max(widths.values(), default=0) + 2 * _MARGIN
    for row in sorted(rows):
        members = sorted(rows[row], key=lambda box: _mean([origin.x for origin in box.sources]) if box.sources else 0)
        x = (total - widths[row] + _GAP) / 2
        for box in members:
            box.x = x + box.width / 2
            x += box.width + _GAP
    return total


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _edge(origin: _Box, box: _Box) -> str:
    top, bottom = origin.y + _HEIGHT / 2, box.y - _HEIGHT / 2
    bend = (bottom - top) / 2
    return (
        f'<path class="edge" d="M{origin.x:.1f},{top:.1f} C{origin.x:.1f},{top + bend:.1f} '
        f'{box.x:.1f},{bottom - bend:.1f} {box.x:.1f},{bottom:.1f}"/>'
    )


def _drawn(box: _Box) -> str:
    left, top = box.x - box.width / 2, box.y - _HEIGHT / 2
    return (
        f'<rect class="{box.kind}" x="{left:.1f}" y="{top:.1f}" width="{box.width:.1f}" height="{_HEIGHT}" rx="5"/>'
        f'<text x="{box.x:.1f}" y="{box.y + 4:.1f}">{escape(box.label)}</text>'
    )
