"""Names of tools and arguments that Python does not take: `go-on`, `from`."""

import itertools
import re
from collections.abc import Iterable
from keyword import iskeyword
from unicodedata import normalize

_MARKS = re.compile("_name([0-9]{1,9})(?=_)")
_STRING = "|".join(
    [r"#[^\n]*"]
    + [rf"{quote}(?:[^\\]|\\.)*?{quote}" for quote in ('"""', "'''", '"', "'")]
)
_BETWEEN = r"\s()\[\]{},=:\"'#"  # what no word has
_WORD = rf"[^{_BETWEEN}]++"
_ONE_WORD = re.compile(_WORD)
# Of several, or with signs that do not end an argument: `page[size]`, `a:b`.
_SIGNED = r"[^\s(){},=\"'#]++"
_PHRASE = re.compile(rf"{_SIGNED}(?: {_SIGNED})*")
_IS_NAMED = r"(?=\(|\s*=(?!=))"  # a call begins behind it, or the value of an argument
# Names of several words, or with other signs, each of which is tried at each place.
_MAX_NAMES_OF_WORDS, _MAX_CHARS_OF_WORDS = 16, 64


class OddNames:
    """
    The odd names of an answer's tools, and stand-ins for them that Python takes.

    A stand-in begins with a mark that is nowhere in its text.

    Args:
        tools: names of tools, which may have dots. arguments: of their arguments.
    """

    def __init__(self, tools: Iterable[str], arguments: Iterable[str]) -> None:
        odd = {name for name in tools if not all(map(is_python_name, name.split(".")))}
        odd |= {name for name in arguments if not is_python_name(name)}
        self._names = sorted(odd - {""})
        self._places = {name: place for place, name in enumerate(self._names)}
        odd_ones = (n for n in self._names if not is_one_word(n) and can_be_spelled(n))
        longest = sorted(odd_ones, key=len, reverse=True)[:_MAX_NAMES_OF_WORDS]
        spelled = "|".join(rf"(?<![\w.-]){re.escape(name)}" for name in longest)
        phrase = f"({spelled}){_IS_NAMED}|" if spelled else "(?!)()|"
        self._found = re.compile(
            f"{phrase}{_STRING}|({_WORD})(?:{_IS_NAMED}())?", re.DOTALL
        )

    def mark_for(self, text: str) -> str:
        """What a stand-in in a text begins with; empty: there are no odd names."""
        if not self._names:
            return ""
        composed = normalize("NFKC", text)  # as Python reads it
        taken = set(map(int, _MARKS.findall(composed)))
        free = next(number for number in itertools.count() if number not in taken)
        return f"_name{free}_"

    def replaced(self, text: str, mark: str) -> str:
        """The text with stand-ins where a call begins, or an argument."""

        def stand_in(one: re.Match[str]) -> str:
            is_named = one[1] is not None or one[3] is not None
            place = self._places.get(one[1] or one[2] or "") if is_named else None
            return one[0] if place is None else f"{mark}{place}_"

        return self._found.sub(stand_in, text) if mark else text

    def restored(self, text: str, mark: str) -> str:
        """The text with the names that its stand-ins stand for."""
        if not mark or mark not in text:
            return text
        return re.sub(rf"{mark}([0-9]+)_", lambda one: self._names[int(one[1])], text)


def is_one_word(name: str) -> bool:
    """Whether a name is read as it is, whatever others there are."""
    return _ONE_WORD.fullmatch(name) is not None


def can_be_spelled(name: str) -> bool:
    """Whether a name is read as it is, where there are few such."""
    is_short = len(name) <= _MAX_CHARS_OF_WORDS and _PHRASE.fullmatch(name)
    return is_one_word(name) or bool(is_short)


def is_python_name(name: str) -> bool:
    """Whether Python takes it for a name, and as it is: it composes letters."""
    is_kept = normalize("NFKC", name) == name
    return name.isidentifier() and is_kept and not iskeyword(name)
