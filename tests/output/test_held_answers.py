"""An answer that is held to a form is text, whatever it quotes, or calls alone."""

from typing import Any

import pytest

from sidecar.core.requests import Tool
from sidecar.output.families import find_family, output_syntax
from sidecar.output.reasoning_splitter import new_splitter
from testkit.call_texts import Read, collect

TOOL = Tool("look", {"type": "object", "properties": {"a": {"type": "string"}}}, {})
CALLS = {
    "hermes": '<tool_call>\n{"name": "look", "arguments": {"a": "x"}}\n</tool_call>',
    "xml": "<tool_call><function=look><parameter=a>x</parameter></function>"
    "</tool_call>",
    "bare element": "<function=look><parameter=a>x</parameter></function>",
    "llama": '{"name": "look", "parameters": {"a": "x"}}',
    "channels": "<|end|><|start|>assistant to=functions.look<|channel|>commentary"
    ' json<|message|>{"a": "x"}<|call|>',
}
MARKS = {
    "hermes": "<tool_call>",
    "xml": "<function=",
    "llama": "<|start_header_id|>ipython",
}


def read(kind: str, text: str, start: Any = "off", *, step: int = 3) -> Read:
    """What a client sees of an answer that is held, by a model of such calls."""
    vocab = ("<|channel|>", "<|message|>") if kind == "channels" else ()
    family = find_family(None, "model", "")
    syntax = output_syntax(family, None, None, MARKS.get(kind, ""), vocab)
    splitter = new_splitter(syntax, start, (TOOL,), is_held=True)
    cut = [text[at : at + step] for at in range(0, len(text), step)]
    pieces = [piece for part in cut for piece in splitter.feed(part)]
    return collect([*pieces, *splitter.flush(is_cut=False)[0]])


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize("quoted", CALLS)
@pytest.mark.parametrize("kind", ["hermes", "xml", "llama"])
@pytest.mark.parametrize("form", ['{{"q": "he said {} ok"}}', "so: {}", "\n {} "])
def test_a_call_that_an_answer_quotes_is_text(
    kind: str, quoted: str, form: str, step: int
) -> None:
    """A stranger's text that a model quotes in its JSON runs nothing."""
    text = form.format(CALLS[quoted])
    if not text.strip().startswith(CALLS[quoted]):
        found = read(kind, text, step=step)
        assert (found.text, found.calls) == (text.strip(), [])
        thought = read(kind, f"hm</think>\n\n{text}", "on", step=step)
        assert (thought.text.strip(), thought.calls) == (text.strip(), [])


@pytest.mark.parametrize("quoted", CALLS)
def test_so_it_is_on_a_channel(quoted: str) -> None:
    form = f'{{"q": "he said {CALLS[quoted]} ok"}}'
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    text = f"{thought}<|channel|>final<|message|>{form}"
    found = read("channels", text)
    assert (found.reasoning, found.text, found.calls) == ("hm", form, [])


@pytest.mark.parametrize("kind", ["hermes", "xml", "llama"])
def test_calls_in_its_place_are_calls(kind: str) -> None:
    """Several too, as the model writes them."""
    again = CALLS[kind].replace('"x"', '"y"').replace(">x<", ">y<")
    text = f"{CALLS[kind]}{'; ' if kind == 'llama' else chr(10)}{again}"
    found = read(kind, text)
    assert [arguments for _, arguments in found.parsed] == [{"a": "x"}, {"a": "y"}]
    assert found.text == ""


def test_what_is_no_call_of_the_models_own_way_is_its_text() -> None:
    """Its grammar lets no other call in, so such a text is of the form."""
    found = read("hermes", CALLS["bare element"])
    assert (found.text, found.calls) == (CALLS["bare element"], [])
