"""
The calculator that `tools.py` gives a model: arithmetic read as a syntax tree, never evaluated as Python.

What cannot be computed is a `ValueError` of one sentence. TRL hands the sentence to the model, as `{'error': ...}`.
"""

import ast
import math
import operator
from collections.abc import Callable


LONGEST = 200  # characters of an expression
LARGEST = 10**50  # of any number on the way, so that 9**9**9 costs nothing

OPERATORS: dict[type[ast.AST], Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculator(expression: str) -> str:
    """
    Value of an arithmetic expression.

    Args:
        expression: Numbers, brackets and + - * / // % **, as in 12 * (3 + 4).
    """
    text = str(expression).strip()
    if not text or len(text) > LONGEST:
        raise ValueError(f"expression has {len(text)} characters: give 1 to {LONGEST}")
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{text!r} is not an arithmetic expression such as 12 * (3 + 4)") from None
    try:
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError(_too_large()) from None
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        value = int(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _value(node: ast.AST) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(left) > 1 and right * math.log10(abs(left)) > math.log10(LARGEST):
            raise ValueError(_too_large())
        return _bounded(OPERATORS[type(node.op)](left, right))
    raise ValueError("only numbers, brackets and + - * / // % ** are allowed")


def _bounded(value: int | float | complex) -> int | float:
    if isinstance(value, complex):  # such as (-8) ** 0.5
        raise ValueError("the result is not a real number")
    if not abs(value) <= LARGEST:  # nor is NaN
        raise ValueError(_too_large())
    return value


def _too_large() -> str:
    return f"a number is larger than {LARGEST:.0e}"
