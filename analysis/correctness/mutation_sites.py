"""Every place of a source file where a small mistake can be planted, found in its syntax tree."""

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPARISONS |= {ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
ARITHMETIC = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
ARITHMETIC |= {ast.Mod: ast.Mult}
EXTREMES = {"min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum"}
# Methods that leave the meaning of a tensor but not its type, range or sharing; the mutant takes the tensor itself.
CONVERSIONS = {"float", "double", "to", "long", "int", "detach", "clone", "view_as", "clamp", "sqrt", "square", "abs"}
COLLECTIVES = ("reduce", "gather", "scatter", "broadcast", "sum_over", "_region")  # parts of names
SYMMETRIC = {"min", "max", "minimum", "maximum", "promote_types", "equal"}  # functions whose arguments can be swapped
UNTOUCHED_KEYWORDS = {"strict"}  # of `zip`: it only checks our own invariants


@dataclass(frozen=True)
class Mutant:
    """One change of one file. `number` counts equal changes in the same function.

    Args:
        start, end: bytes of the source that `text` replaces.
    """

    file: str
    function: str
    line: int
    operator: str
    old: str
    new: str
    number: int
    start: int
    end: int
    text: str

    @property
    def key(self) -> str:
        """Place and change; a change elsewhere in the file leaves it as it is."""
        return f"{self.file} {self.function} #{self.number}: {self.old} -> {self.new}"

    def plant(self, source: bytes) -> bytes:
        """The source with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a source file, in the order of its syntax tree."""
    lines = [0]
    for line in source.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    found, seen = [], Counter()
    for function, node, operator, new in _changes(ast.parse(source), "module"):
        old_text, new_text = ast.unparse(node), ast.unparse(new)
        if new_text == old_text:
            continue
        seen[function, old_text, new_text] += 1
        number = seen[function, old_text, new_text]
        span = (lines[node.lineno - 1] + node.col_offset, lines[node.end_lineno - 1] + node.end_col_offset)
        text = new_text if isinstance(new, ast.stmt) else f"({new_text})"
        found.append(Mutant(file, function, node.lineno, operator, old_text, new_text, number, *span, text))
    return found


def _changes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST, str, ast.AST]]:
    """(enclosing function, node, operator, node in its place) for `node` and everything below it."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        function = node.name if function == "module" else f"{function}.{node.name}"
    for operator, new in [*_statement_changes(node), *_expression_changes(node), *_call_changes(node)]:
        yield function, node, operator, new
    if isinstance(node, ast.If | ast.IfExp | ast.While) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        yield function, node.test, "not", ast.UnaryOp(ast.Not(), node.test)
    for child in _children(node):
        yield from _changes(child, function)


def _children(node: ast.AST) -> list[ast.AST]:
    """Children in which a change can alter what the program computes."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        arguments = node.args.defaults + node.args.kw_defaults if isinstance(node, ast.FunctionDef) else []
        return [*(default for default in arguments if default is not None), *node.body]
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value is not None else []
    if isinstance(node, ast.keyword) and node.arg in UNTOUCHED_KEYWORDS:
        return []
    # Messages; our own invariants; the positions inside f-strings differ between versions of Python.
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return []
    return list(ast.iter_child_nodes(node))


def _changed(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _statement_changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    sets_part = isinstance(node, ast.Assign) and any(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
    calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if sets_part or calls or isinstance(node, ast.AugAssign | ast.Raise):
        yield "dropped statement", ast.Pass()
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", _changed(node, op=ARITHMETIC[type(node.op)]())


def _expression_changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            yield "comparison", _changed(node, ops=[*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1 :]])
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield "arithmetic", _changed(node, op=ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield "and/or", _changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.UnaryOp):
        yield "dropped not or sign", node.operand
    elif isinstance(node, ast.Constant):
        for value in _other_constants(node.value):
            yield "constant", ast.Constant(value)
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                yield "dropped part of a string", _changed(node, values=[v for v in node.values if v is not part])
    elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice):
        for name in ("lower", "upper"):
            if (bound := getattr(node.slice, name)) is not None:
                moved = ast.BinOp(bound, ast.Add() if name == "lower" else ast.Sub(), ast.Constant(1))
                yield "range end", _changed(node, slice=_changed(node.slice, **{name: moved}))


def _other_constants(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [1 - value] if value in (0, 1) else [value + 1, value - 1]
    if isinstance(value, float):
        return [1.0 - value] if value in (0.0, 1.0) else [2 * value]
    return []


def _call_changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if not isinstance(node, ast.Call):
        return
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in UNTOUCHED_KEYWORDS:
            yield "dropped keyword", _changed(node, keywords=[k for k in node.keywords if k is not keyword])
    plain = [arg for arg in node.args if not isinstance(arg, ast.Starred)]
    for i in range(len(plain) - 1 if len(plain) == len(node.args) and name not in SYMMETRIC else 0):
        swapped = [*plain[:i], plain[i + 1], plain[i], *plain[i + 2 :]]
        yield "swapped arguments", _changed(node, args=swapped)
    if name in EXTREMES:
        func = copy.copy(node.func)
        setattr(func, "attr" if isinstance(func, ast.Attribute) else "id", EXTREMES[name])
        yield "min/max", _changed(node, func=func)
    if name in CONVERSIONS and isinstance(node.func, ast.Attribute):
        yield "dropped conversion", node.func.value
    if any(part in name for part in COLLECTIVES) and plain:
        yield "dropped collective", plain[0]
    if name == "range":
        ends = [(len(node.args) - 1 if len(node.args) < 3 else 1, ast.Sub())]
        for i, op in ends + ([(0, ast.Add())] if len(node.args) > 1 else []):
            args = list(node.args)
            args[i] = ast.BinOp(args[i], op, ast.Constant(1))
            yield "range end", _changed(node, args=args)
