"""Mutants made from the syntax tree: one operator, constant, condition or statement is changed.

They are many and nobody chose them, so a run draws a sample. A survivor is a question and not an
error: a test may be missing, or the change may make no difference.
"""

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planted import Project

_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}


@dataclass(frozen=True)
class Generated:
    """A change of the text [start, end) of a file."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str
    context: str
    equivalent: str = ""

    @property
    def id(self) -> str:
        """Where it is: file, line and characters."""
        return f"{self.file}:{self.line}:{self.start}-{self.end}"

    @property
    def why(self) -> str:
        """The change, on one line."""
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"`{old}` becomes `{new}` in: {self.context}"

    def planted_in(self, text: str) -> str:
        """The text of the file with the change in it."""
        if text[self.start : self.end] != self.old:
            raise AssertionError(f"{self.id}: the file has changed")
        return text[: self.start] + self.new + text[self.end :]


def generated(project: Project, packages: Sequence[str]) -> list[Generated]:
    """All mutants of the given packages, whether they compile or not."""
    found: dict[str, Generated] = {}
    for package in packages:
        for path in sorted((project.package / package).rglob("*.py")):
            for mutant in _Mutants(str(path.relative_to(project.package)), path.read_text()):
                found.setdefault(mutant.id, mutant)
    return list(found.values())


def sample(project: Project, mutants: list[Generated], count: int, seed: int) -> list[Generated]:
    """`count` mutants that compile and change something, drawn at random, in order."""
    drawn: list[Generated] = []
    for mutant in random.Random(seed).sample(mutants, len(mutants)):
        if len(drawn) == count:
            break
        text = (project.package / mutant.file).read_text()
        try:
            changed = ast.parse(mutant.planted_in(text))
        except SyntaxError:
            continue
        if ast.dump(changed) != ast.dump(ast.parse(text)):
            drawn.append(mutant)
    return sorted(drawn, key=lambda mutant: (mutant.file, mutant.start))


class _Mutants:
    """The mutants of one file."""

    def __init__(self, file: str, text: str) -> None:
        self._file, self._text = file, text
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line.encode()))
        self._bytes = text.encode()

    def __iter__(self) -> Iterator[Generated]:
        return self._of(ast.parse(self._text))

    def _of(self, node: ast.AST) -> Iterator[Generated]:
        match node:
            case ast.Compare(left, ops, comparators):
                operands = [left, *comparators]
                for k, op in enumerate(ops):
                    yield from self._operator(operands[k], operands[k + 1], *_COMPARISONS[type(op)])
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                yield from self._operator(left, right, *_OPERATORS[type(op)])
            case ast.BoolOp(op, values):
                for left, right in pairwise(values):
                    yield from self._operator(left, right, *_OPERATORS[type(op)])
            case ast.AugAssign(target, op, value) if type(op) in _OPERATORS:
                old, new = _OPERATORS[type(op)]
                yield from self._operator(target, value, f"{old}=", f"{new}=")
            case ast.UnaryOp(ast.Not() | ast.USub(), operand):
                yield self._replaced(node, self._source(operand))
            case ast.Constant(bool() as value):
                yield self._replaced(node, str(not value))
            case ast.Constant(int() as value):
                yield self._replaced(node, str(value + 1))
            case ast.Constant(float() as value):
                yield self._replaced(node, repr(2 * value or 1.0))
            case ast.If(test) | ast.IfExp(test) | ast.While(test):
                negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
                if not negated and self._source(test) not in ("TYPE_CHECKING", "True"):
                    yield self._replaced(test, f"(not ({self._source(test)}))")
            case ast.Expr(ast.Call()):
                yield self._replaced(node, "pass")
            case ast.Raise() if "AssertionError" not in self._source(node):
                yield self._replaced(node, "pass")
        for child in self._children(node):
            yield from self._of(child)

    def _children(self, node: ast.AST) -> Iterator[ast.AST]:
        """Children that compute: no annotations, decorators, messages, docstrings or `strict=`."""
        if isinstance(node, ast.keyword) and node.arg == "strict":
            return
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                text = isinstance(child, ast.JoinedStr) or (
                    isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
                )
                if isinstance(child, ast.AST) and not text and not isinstance(node, ast.Raise):
                    yield child

    def _operator(self, left: ast.expr, right: ast.expr, old: str, new: str) -> Iterator[Generated]:
        """The operator between two operands, changed; nothing where it cannot be found."""
        start, end = self._end(left), self._start(right)
        between = self._bytes[start:end].decode()
        place = between.find(old)
        if place >= 0:
            line = self._bytes[:start].count(b"\n") + 1
            changed = between[:place] + new + between[place + len(old) :]
            yield self._made(line, start, end, changed)

    def _replaced(self, node: ast.AST, new: str) -> Generated:
        return self._made(getattr(node, "lineno", 1), self._start(node), self._end(node), new)

    def _made(self, line: int, start: int, end: int, new: str) -> Generated:
        """Positions in bytes become positions in the text."""
        before, old = self._bytes[:start].decode(), self._bytes[start:end].decode()
        context = self._text.splitlines()[line - 1].strip()
        return Generated(self._file, line, len(before), len(before) + len(old), old, new, context)

    def _source(self, node: ast.AST) -> str:
        return self._bytes[self._start(node) : self._end(node)].decode()

    def _start(self, node: ast.AST) -> int:
        return self._lines[getattr(node, "lineno", 1) - 1] + int(getattr(node, "col_offset", 0))

    def _end(self, node: ast.AST) -> int:
        place = self._lines[getattr(node, "end_lineno", 1) - 1]
        return place + int(getattr(node, "end_col_offset", 0))
