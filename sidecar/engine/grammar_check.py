"""
Tries a grammar in a process of its own: reads it from stdin, says what is wrong.

    python limited_child.py grammar_check.py < GRAMMAR

Some schemas of a kilobyte are compiled for minutes, and take gigabytes; nothing ends
that within a process. So a new grammar is compiled here first, for a vocabulary of
bytes and one token, which stands for all that the grammar names, and a few random bytes
of it are written. It is run as a file, and imports the library alone, which takes a
tenth of a second.
"""

import random
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

NUM_BYTES = 96  # that are written
SPECIAL = 256  # the token
_STACK_BYTES = 1 << 20


def limits() -> LLParserLimits:
    """
    What one step may take, for whoever follows a grammar.

    Lower than the library's where a step takes seconds or keeps 200 MB, and higher for
    schemas of thousands of names.
    """
    return LLParserLimits(
        max_items_in_row=8000,
        step_max_items=100_000,
        step_lexer_fuel=50_000,
        max_lexer_states=50_000,
    )


class _Bytes:
    """A vocabulary of bytes, and one special token."""

    eos_token_id = SPECIAL
    bos_token_id = None
    special_token_ids = (SPECIAL,)
    tokens = (*(bytes((number,)) for number in range(256)), b"<|end|>")

    def __call__(self, text: Any) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def fault(lark: str) -> str:
    """What is wrong with a grammar; "" if nothing is."""
    tokens = LLTokenizer(TokenizerWrapper(_Bytes()))
    grammar = LLMatcher.grammar_from_lark(lark)
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits())
    chance = random.Random(0)
    for _ in range(NUM_BYTES):
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        allowed = [i for i in range(SPECIAL) if mask[i // 8] >> (i % 8) & 1]
        if not allowed or not matcher.consume_token(chance.choice(allowed)):
            break
    return str(matcher.get_error())


def _write_fault(lark: str) -> None:
    sys.stdout.write(fault(lark))


if __name__ == "__main__":
    # Less than a server's thread has, which compiles what passes: it overflows here.
    threading.stack_size(_STACK_BYTES)
    trial = threading.Thread(target=_write_fault, args=(sys.stdin.read(),))
    trial.start()
    trial.join()
