"""Tests name names and values: few of them pin a sentence, so that a message can be made clearer without a test's consent."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
BAR = 0.03
"""The largest share of tests that may pin a sentence."""
_WORD = re.compile(r"(?<![\w.'`/-])[A-Za-z][a-z]*(?![\w`/(=]|\.\w|-\w)")
"""A word of English, and no part of a name, a path, an option or a number with its unit."""
_ENDS = re.compile(r"[.?!]\s*$")
_CLAUSE = re.compile(r"[a-z]{2,}[,;:] [a-z]{2,}")


def is_sentence(text: str) -> bool:
    """Six words or more, with an end or with two clauses."""
    return len(_WORD.findall(text)) >= 6 and bool(_ENDS.search(text) or _CLAUSE.search(text))


def texts(node: ast.AST) -> Iterator[str]:
    """The texts that stand in an expression; what an f-string computes is a word of no language."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(part.value) if isinstance(part, ast.Constant) else "0" for part in node.values)
    elif isinstance(node, ast.Constant):
        yield from [node.value] if isinstance(node.value, str) else []
    else:
        for child in ast.iter_child_nodes(node):
            yield from texts(child)


def pinned(test: ast.AST) -> list[str]:
    """The sentences that a test wants: equal to something, in something, or matched by an error."""
    wanted: list[ast.AST] = [
        part.value for part in ast.walk(test) if isinstance(part, ast.keyword) and part.arg == "match"
    ]
    asserted = (part.test for part in ast.walk(test) if isinstance(part, ast.Assert))
    for compared in (part for one in asserted for part in ast.walk(one) if isinstance(part, ast.Compare)):
        for operator, left, right in zip(
            compared.ops, [compared.left, *compared.comparators], compared.comparators, strict=False
        ):
            wanted += [left, right] if isinstance(operator, ast.Eq) else [left] if isinstance(operator, ast.In) else []
    return [text for one in wanted for text in texts(one) if is_sentence(text)]


def test_few_tests_pin_a_sentence() -> None:
    """The share is below the bar; a failure lists the sentences, of which names and values should be left."""
    tests = {
        f"{file.relative_to(TESTS)}:{part.lineno} {part.name}": pinned(part)
        for file in sorted(TESTS.rglob("test_*.py"))
        for part in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(part, ast.FunctionDef) and part.name.startswith("test_")
    }
    pinning = {name: sentences for name, sentences in tests.items() if sentences}
    share = len(pinning) / len(tests)
    assert share <= BAR, f"{share:.1%} of {len(tests)} tests:\n" + "\n".join(
        f"{name}: {pinning[name]}" for name in pinning
    )


def test_a_sentence_is_told_from_names_and_values() -> None:
    """What is compared with ``==``, ``in`` and ``match=`` counts, in f-strings too; names, values and excerpts do not."""
    wanted = "The model's graph was not captured, because it reads the host."
    source = f"""
def test() -> None:
    assert said == "{wanted}"
    assert "{wanted}" in said
    assert f"{wanted[:-1]}: {{reason}}." in said
    with pytest.raises(Error, match="{wanted}"):
        assert "nothing of this is here: it is not wanted there" not in said
    assert "rank 0: all_reduce number 2 of 16 bytes of float32 (sum) at " in said
    assert said.count("one") == 2, "{wanted}"
"""
    assert pinned(ast.parse(source)) == [wanted, wanted, wanted, f"{wanted[:-1]}: 0."]
