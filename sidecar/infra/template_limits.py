"""
Bounds for arithmetic in chat templates, which come with models that anybody made.

Python computes a power or a long text in one go: no other thread runs meanwhile, and
54 bytes of a template can keep it for hours or take all memory.
"""

import operator
import re
from typing import Any

from jinja2.sandbox import SandboxedEnvironment

_MAX_LENGTH = 10_000_000  # of a text or a list that is made by multiplying one
_MAX_BITS = 10_000  # of a number
_MAX_FORMAT = 100_000  # characters of a `%` format
# A width or a precision of a `%` format.
_WIDTH = re.compile(r"%(?:\([^)]{0,100}\))?+[^%(a-zA-Z]*?(?:\*|\d{5,})")


def limit_templates() -> None:
    """Have jinja's sandboxes refuse what takes too long. Twice does no harm."""
    bounded = {"**": _power, "*": _product, "%": _remainder}
    SandboxedEnvironment.intercepted_binops = frozenset(bounded)
    SandboxedEnvironment.default_binop_table.update(bounded)


def _power(base: Any, exponent: Any) -> Any:
    are_whole = isinstance(base, int) and isinstance(exponent, int)
    if are_whole and exponent * base.bit_length() > _MAX_BITS:
        raise OverflowError("a chat template asks for too large a power")
    return operator.pow(base, exponent)


def _product(left: Any, right: Any) -> Any:
    are_whole = isinstance(left, int) and isinstance(right, int)
    if are_whole and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise OverflowError("a chat template asks for too large a number")
    for whole, times in ((left, right), (right, left)):
        is_repeated = isinstance(times, int) and isinstance(whole, str | list | tuple)
        if is_repeated and len(whole) * times > _MAX_LENGTH:
            raise OverflowError("a chat template asks for too long a text")
    return operator.mul(left, right)


def _remainder(left: Any, right: Any) -> Any:
    """Of numbers; or a text as a format, whose widths may be long."""
    if isinstance(left, str) and len(left) > _MAX_FORMAT:
        raise OverflowError("a chat template asks for too long a format")
    if isinstance(left, str) and _WIDTH.search(left.replace("%%", "")):
        raise OverflowError("a chat template asks for too wide a text")
    return operator.mod(left, right)
