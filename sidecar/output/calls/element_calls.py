"""Calls as elements: one for the function, one inside it for each argument."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from sidecar.output.calls.call_sink import Block
from sidecar.output.calls.json_text import printed, read_object
from sidecar.output.calls.scanner import NotThisFormat, Wait
from sidecar.output.calls.tool_schema import ANY_TYPE, TEXT_ALONE
from sidecar.output.calls.unquoted_values import read_held_value, read_raw_value
from sidecar.output.pieces import could_begin

_ANY = re.IGNORECASE | re.ASCII


@dataclass(frozen=True, slots=True)
class Elements:
    """
    How one format writes its elements.

    Args:
        call, argument: opening tags; `name` is what they name, and `string` is "true"
            where an argument says that it is a string, "false" where it is JSON.
        call_end: the closing tag. argument_end: the same, of an argument's name.
        mark: what stands before each opening tag.
        is_padded: a line break stands at both edges of a value.
        is_python: templates print values that are no strings as Python does.
    """

    call: re.Pattern[str]
    call_end: str
    argument: re.Pattern[str]
    argument_end: Callable[[str], str]
    mark: str = ""
    is_padded: bool = False
    is_python: bool = False

    def written_end(self, name: str) -> str:
        """What a template prints behind the value of an argument."""
        return ("\n" if self.is_padded else "") + self.argument_end(name) + "\n"


QWEN = Elements(
    re.compile(r"<function=(?P<name>[^<>\s](?:[^<>\n]*[^<>\s])?)\s*>", _ANY),
    "</function>",
    re.compile(r"<parameter=(?P<name>[^<>\s](?:[^<>\n]*[^<>\s])?)\s*>", _ANY),
    lambda name: "</parameter>",
    is_padded=True,
    is_python=True,
)
SEED = replace(QWEN, is_padded=False)
MINIMAX = Elements(
    re.compile(r'<invoke\s+name="?(?P<name>[^">]+)"?\s*>', _ANY),
    "</invoke>",
    re.compile(r'<parameter\s+name="?(?P<name>[^">]+)"?\s*>', _ANY),
    lambda name: "</parameter>",
)
_MARK = "]<]minimax[>["
MINIMAX_M3_NAME = re.compile(r"[\w.$@-]+")
MINIMAX_M3 = Elements(
    MINIMAX.call,
    f"{_MARK}</invoke>",
    re.compile(rf"<(?P<name>{MINIMAX_M3_NAME.pattern})>"),
    lambda name: f"{_MARK}</{name}>",
    _MARK,
)


def _dsml(space: str) -> Elements:
    argument = rf'<｜DSML｜{space}parameter name="(?P<name>[^"]+)"'
    return Elements(
        re.compile(rf'<｜DSML｜{space}invoke name="(?P<name>[^"]+)"\s*>'),
        f"</｜DSML｜{space}invoke>",
        re.compile(rf'{argument}(?: string="(?P<string>true|false)")?\s*>'),
        lambda name: f"</｜DSML｜{space}parameter>",
    )


DSML, DSML_SPACED = _dsml(""), _dsml(" ")


def qwen3_coder_xml(block: Block) -> Wait[None]:
    """
    `<function=NAME><parameter=KEY>VALUE</parameter>..</function>`, one or more.

    Or an object within the function element, as Llama writes it.
    """
    yield from _calls(block, QWEN)


def seed_xml(block: Block) -> Wait[None]:
    """The same without line breaks around a value."""
    yield from _calls(block, SEED)


def minimax_xml(block: Block) -> Wait[None]:
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter>..</invoke>`."""
    yield from _calls(block, MINIMAX)


def minimax_m3_xml(block: Block) -> Wait[None]:
    """`<invoke name="NAME"><KEY>VALUE</KEY>..</invoke>`, a mark before each tag."""
    yield from _calls(block, MINIMAX_M3)


def deepseek_dsml(block: Block) -> Wait[None]:
    """`invoke` elements of `parameter` elements that say whether they are strings."""
    yield from _calls(block, DSML)


def deepseek_dsml_spaced(block: Block) -> Wait[None]:
    """The same, with a space before each element's name."""
    yield from _calls(block, DSML_SPACED)


def _calls(block: Block, elements: Elements) -> Wait[None]:
    """All calls of a block; it ends where no further one begins."""
    scan = block.scan
    while True:
        yield from scan.space()
        start = scan.at
        tag = yield from _tag(block, elements, elements.call)
        if tag is None:
            scan.at = start
            break
        yield from _call(block, elements, tag["name"])


def _call(block: Block, elements: Elements, name: str) -> Wait[None]:
    scan, sink = block.scan, block.sink
    sink.start(name)
    if (yield from scan.space()) == "{":
        yield from read_object(scan, sink.arguments)
        yield from scan.space()
        yield from scan.expect(elements.call_end)
        block.end_call()
        return
    between, given = "{", set[str]()
    while not (yield from scan.take(elements.call_end)):
        tag = yield from _tag(block, elements, elements.argument)
        if tag is None:
            raise NotThisFormat("no argument element")
        sink.arguments(f"{between}{printed(tag['name'])}: ")
        given.add(tag["name"])
        yield from _value(block, elements, name, tag, given)
        between = ", "
        yield from scan.space()
    sink.arguments("{}" if between == "{" else "}")
    block.end_call()


_Tag = dict[str, str]


def _tag(
    block: Block, elements: Elements, pattern: re.Pattern[str]
) -> Wait[_Tag | None]:
    """Read an opening tag; None: there is none here."""
    scan = block.scan
    if not (yield from scan.stands(f"{elements.mark}<")):
        return None
    scan.at += len(elements.mark)
    found = pattern.fullmatch((yield from scan.tag()))
    return found.groupdict() if found else None


def _value(
    block: Block, elements: Elements, name: str, tag: _Tag, given: Collection[str]
) -> Wait[None]:
    """
    Read an argument up to its closing tag: a string as it comes, else JSON.

    Args:
        given: the arguments so far: none is given twice.
    """
    scan, show = block.scan, block.sink.arguments
    declared = block.tools.types_of(name).get(tag["name"], ANY_TYPE)
    if says := tag.get("string"):
        declared = TEXT_ALONE if says == "true" else ANY_TYPE - TEXT_ALONE
    if block.tools.are_held:
        end, is_python = elements.written_end(tag["name"]), elements.is_python
        if elements.is_padded:
            yield from scan.expect("\n")
        choices = block.tools.text_choices(name, tag["name"])
        if says == "false":
            choices = ()
        yield from read_held_value(
            scan, show, end, declared, choices, is_python=is_python
        )
        return

    def is_end() -> Wait[bool]:
        return (yield from block.goes_on(_is_followed(block, elements, name, given)))

    yield from read_raw_value(
        scan,
        show,
        elements.argument_end(tag["name"]),
        is_end,
        types=declared,
        is_padded=elements.is_padded,
        is_python=elements.is_python,
    )


def _is_followed(
    block: Block, elements: Elements, name: str, given: Collection[str]
) -> Wait[bool]:
    """
    Whether what follows an argument is another one, or the call's end.

    One that the schema does not name begins a line, as models write it.
    """
    scan = block.scan
    if (yield from scan.space()) and (yield from scan.stands(elements.call_end)):
        return True
    is_line = scan.begins_line
    tag = yield from _tag(block, elements, elements.argument)
    ends = (elements.call_end, block.closer, f"{elements.mark}<")
    if scan.is_cut and any(could_begin(scan.rest, end) for end in ends):
        raise NotThisFormat("the text ends behind an argument")
    if tag is None or tag["name"] in given:
        return False
    if block.tools.declares(name, tag["name"]):
        return True
    return is_line and block.tools.may_have(name)
