"""NORMALIZE_WRITE_TOOL_CONTENT_FOR_PROMPT: digests of what past calls wrote."""

import hashlib
import json
import re
from typing import Any

import pytest

from sidecar.core.requests import ToolCall
from sidecar.pipeline.template.written_contents import omit_written
from testkit.chats import Chats, Client, Said, assistant, result, tool, user

FILE = "def one():\n    return 1\n\n\ndef zwei():\n    return 'ü'\n"


def call(name: str, call_id: str = "call_1", **arguments: Any) -> ToolCall:
    return ToolCall(call_id, name, json.dumps(arguments))


def omitted(one: ToolCall) -> Any:
    (message,) = omit_written([assistant("Now.", one)])
    assert (message.text, message.tool_calls[0].id) == ("Now.", one.id)
    return json.loads(message.tool_calls[0].arguments)


@pytest.mark.parametrize("name", ["write", "Write", "WRITE"])
def test_a_content_is_a_digest_and_its_lengths(name: str) -> None:
    """The other arguments stay; lengths are of bytes, characters and lines."""
    sha1 = hashlib.sha1(FILE.encode(), usedforsecurity=False).hexdigest()[:16]
    assert omitted(call(name, file_path="a.py", content=FILE)) == {
        "file_path": "a.py",
        "content": f"__WRITE_CONTENT_OMITTED__sha1={sha1};"
        f"bytes={len(FILE.encode())};chars={len(FILE)};lines=6__",
    }


def test_a_content_that_is_no_text_is_one_as_well() -> None:
    """Of its JSON with sorted keys."""
    found = omitted(call("write", content={"b": [1], "a": None}))
    again = omitted(call("write", content={"a": None, "b": [1]}))
    assert found == again
    pattern = r"__WRITE_CONTENT_OMITTED_NONSTRING__sha1=[0-9a-f]{16};bytes=21__"
    assert re.fullmatch(pattern, found["content"])


@pytest.mark.parametrize(
    "one",
    [call("edit", content=FILE), call("write_file", content=FILE),
     call("write", path="a"), ToolCall("i", "write", "[]")],
)  # fmt: skip
def test_nothing_else_is_touched(one: ToolCall) -> None:
    """Other tools, calls without a content, arguments that are another value."""
    messages = [user("write it"), assistant("", one), result(FILE, one.id)]
    assert omit_written(messages) == tuple(messages)


@pytest.mark.parametrize(
    "arguments",
    ['{"path": "a", "content": "SECRET\nline"}', '{"content": "SECRET"}}', "{",
     '\ufeff{"content": "SECRET"}', f'{{"x": {"9" * 5000}, "content": "SECRET"}}',
     f'{{"content": {"[" * 3000}"SECRET"{"]" * 3000}}}', '{"input": "SECRET"}'],
    ids=["line break", "brace too many", "cut", "mark", "digits", "deep", "custom"],
)  # fmt: skip
def test_what_is_written_in_an_odd_way_is_hidden_as_well(arguments: str) -> None:
    """What cannot be read is hidden whole; a custom tool's call is one bare text."""
    (message,) = omit_written([assistant("", ToolCall("i", "write", arguments))])
    shown = message.tool_calls[0].arguments
    assert "SECRET" not in shown
    assert "__WRITE_CONTENT_OMITTED" in shown
    json.loads(shown)


def test_half_a_pair_beside_a_content_stays_escaped() -> None:
    """As text no tokenizer takes it."""
    odd = ToolCall("i", "write", '{"p": "\\ud801\\u00fc", "content": "x"}')
    (message,) = omit_written([assistant("", odd)])
    shown = message.tool_calls[0].arguments
    shown.encode()
    assert json.loads(shown)["p"] == "\ud801ü"
    asked = [user("Make it."), assistant("", odd), result("done", "i")]
    client = Client(tools=(tool("write"),))
    assert Chats(omits_written=True).ask(asked, client).model_ids


@pytest.mark.parametrize("session", ["s", None])
def test_the_model_reads_the_digest_and_never_the_content(session: str | None) -> None:
    """Also where the server knows the call's own ids: they would say the content."""
    said = Said("", "I write it.", (call("write", path="a.py", content=FILE),))
    client = Client(session=session, tools=(tool("write"),))
    chats = Chats(omits_written=True)
    asked = [user("Make a.py.")]
    chats.turn(asked, said, client)
    asked += [said.echo, result("done")]
    second = chats.turn(asked, "It is there.", client)
    asked += [assistant("It is there."), user("Thanks.")]
    third = chats.turn(asked, client=client)
    for turn in (second, third):
        assert "return 1" not in turn.text
        assert "__WRITE_CONTENT_OMITTED__sha1=" in turn.text
    # What was read once is reused: the digest is the same each time.
    assert third.reused >= len(second.prompt.model_ids) - 8


def test_without_the_setting_the_model_reads_the_whole() -> None:
    """As its client sent it."""
    one = call("write", path="a.py", content=FILE)
    asked = [user("Make a.py."), assistant("", one), result("done")]
    assert "return 1" in Chats().ask(asked, Client(tools=(tool("write"),))).text
