"""What a grammar of calls lets a model write is read back as those calls."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer

import sidecar
from sidecar.core.requests import Tool, ToolChoice
from sidecar.output.calls.call_sink import Format, ToolSyntax
from sidecar.output.families import find_family, output_syntax
from sidecar.output.grammars.call_grammar import (
    Calls,
    call_grammar,
    calls_of,
    can_hold_blocks,
    can_hold_calls,
)
from sidecar.output.output_syntax import OutputSyntax
from sidecar.output.reasoning_splitter import new_splitter
from testkit.call_texts import Read, collect
from testkit.grammar_texts import GrammarTexts
from testkit.real_templates import FAMILIES, tokenizer_of_family

BUILTIN = Path(sidecar.__file__).parent / "builtin_model"
TEXT = {"type": "string", "maxLength": 6}
REQUIRED = ToolChoice("required")


def tool(name: str, properties: dict[str, Any], required: Sequence[str]) -> Tool:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    function = {"name": name, "parameters": schema}
    return Tool(name, schema, {"type": "function", "function": function})


TOOLS = (
    tool(
        "look",
        {
            "at": TEXT,
            "times": {"type": "integer"},
            "deep": {"type": "boolean"},
            "note": {"anyOf": [TEXT, {"type": "null"}]},
        },
        ["at"],
    ),
    tool("go-on", {}, []),
    tool(
        "move",
        {
            "to": {"enum": ["left", "right"]},
            "by": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            "with": {
                "type": "object",
                "properties": {"far": {"type": "boolean"}, "a-b": {"const": 5}},
                "required": ["far"],
                "additionalProperties": False,
            },
        },
        ["to", "with"],
    ),
)
BY_NAME = {one.name: one for one in TOOLS}
# A mark of a template or vocabulary, of formats that no fixture's template is of.
OTHERS = {
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "minimax-m3": ("]<]minimax[>[", "<tool_call>", "</tool_call>"),
    "deepseek-v4.1": ("｜DSML｜", "｜DSML｜ invoke", "<｜DSML｜ calls>"),
    "cohere": ("<|START_ACTION|>", "<|END_ACTION|>"),
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "longcat-2": (
        "<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>",
        "</longcat_arg_key>", "<longcat_arg_value>", "</longcat_arg_value>",
    ),
    "glm-xml": ("<name>", "</name>", "<tool_call>"),
    "granite-3": ("<|tool_call|>",),
    "phi-4-mini": ("<|tool_call|>", "<|/tool_call|>"),
    "tool_code": ("```tool_code",),
    "llama-tag": ("<|python_tag|>",),
}  # fmt: skip


class Model:
    """What is known of a model's calls at load, and a writer in its tokens."""

    family = ""

    def __init__(self, name: str, tokenizer: Any, template: str) -> None:
        self.vocab = tokenizer.get_vocab()
        family = find_family(None, name, "")
        self.syntax = output_syntax(family, None, None, template, self.vocab)
        self.texts = GrammarTexts(tokenizer)

    def calls_of(self, choice: ToolChoice, tools: Sequence[Tool] = TOOLS) -> Calls:
        return calls_of(choice, tools, self.syntax.calls[0], self.vocab)

    def grammar(self, choice: ToolChoice, tools: Sequence[Tool] = TOOLS) -> str:
        calls = self.calls_of(choice, tools)
        return call_grammar(calls, self.syntax.calls[0], self.vocab)


def read(
    syntax: OutputSyntax,
    text: str,
    tools: Sequence[Tool] = TOOLS,
    *,
    are_held: bool = True,
) -> Read:
    """The answer as its client sees it, cut into characters."""
    splitter = new_splitter(
        syntax, "off", tools, is_held=are_held, are_calls_held=are_held
    )
    pieces = [piece for char in text for piece in splitter.feed(char)]
    return collect([*pieces, *splitter.flush(is_cut=False)[0]])


def check(model: Model, texts: Sequence[str], choice: ToolChoice) -> set[str]:
    """Each text is calls and nothing else, and keeps to the schemas; their names."""
    names = set()
    for text in texts:
        found = read(model.syntax, text)
        assert found.calls, text
        assert (found.text.strip(), found.broken, found.open) == ("", [], None), text
        for name, arguments in found.parsed:
            names.add(name)
            # What stands without quotes is of any length.
            for key in ("at", "note"):
                if isinstance(arguments.get(key), str):
                    arguments[key] = "a"
            jsonschema.validate(arguments, dict(BY_NAME[name].parameters))
        if choice.name:
            assert [name for name, _ in found.calls] == [choice.name]
    return names


def marked(tokens: Sequence[str], folder: Path, *, are_tokens: bool) -> Any:
    """The built-in model's tokenizer, with these tokens or without any of a call."""
    made = json.loads((BUILTIN / "tokenizer.json").read_text())
    for number, token in enumerate(made["added_tokens"]):
        if "tool" in token["content"]:
            token["content"] = f"<unused{number}>"
    core = Tokenizer.from_str(json.dumps(made))
    if are_tokens:
        marks = [one for one in tokens if not re.search("invoke|calls>|name>", one)]
        core.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    core.save(str(folder / "tokenizer.json"))
    config = (BUILTIN / "tokenizer_config.json").read_text()
    (folder / "tokenizer_config.json").write_text(config)
    return load_tokenizer(folder)


def written(model: Model, choice: ToolChoice, seeds: int) -> list[str]:
    grammar = model.grammar(choice)
    found = [model.texts.write(grammar, seed) for seed in range(seeds)]
    return [text for text in found if text is not None]


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_calls_of_each_family_are_held_and_read_back(family: str) -> None:
    """In the tokens of its own template."""
    tokenizer = tokenizer_of_family(family)
    model = Model(family, tokenizer, str(tokenizer.chat_template or ""))
    names = check(model, written(model, REQUIRED, 40), REQUIRED)
    assert names >= {"go-on", "move"}  # a text without quotes seldom ends by chance
    named = ToolChoice("named", "move")
    assert check(model, written(model, named, 10), named) == {"move"}
    single = ToolChoice("required", is_single=True)
    for text in written(model, single, 10):
        assert len(read(model.syntax, text).calls) == 1


@pytest.mark.parametrize("are_tokens", [True, False])
@pytest.mark.parametrize("kind", OTHERS)
def test_so_are_those_of_formats_without_a_template_here(
    kind: str, tmp_path: Path, *, are_tokens: bool
) -> None:
    """Their marks may be tokens of the vocabulary, or text."""
    tokenizer = marked(OTHERS[kind], tmp_path, are_tokens=are_tokens)
    model = Model("model", tokenizer, " ".join(OTHERS[kind]))
    names = check(model, written(model, REQUIRED, 40), REQUIRED)
    assert names >= {"go-on", "move"}


def test_a_format_that_only_the_library_reads_has_no_grammar() -> None:
    library: Format = lambda block: iter(())  # type: ignore[assignment,return-value] # noqa: E731
    syntax = ToolSyntax("<a>", "</a>", (library,))
    assert not can_hold_calls(syntax)
    assert not can_hold_blocks(syntax, {"<a>": 1})


def test_names_that_python_does_not_take_are_written_and_read() -> None:
    tokenizer = tokenizer_of_family("lfm2")
    model = Model("lfm2", tokenizer, tokenizer.chat_template)
    odd = {"a-b": {"const": 1}, "from": {"type": "string"}}
    text = "<|tool_call_start|>[go-on(a-b=1, from='from=1, a-b')]<|tool_call_end|>"
    tools = [tool("go-on", odd, ["a-b"])]
    assert model.texts.takes(model.grammar(REQUIRED, tools), text)
    found = read(model.syntax, text, tools)
    assert found.parsed == [("go-on", {"a-b": 1, "from": "from=1, a-b"})]


@pytest.mark.parametrize(
    "name",
    ["page[size]", "a,b", "it's", "a=b", "f(x)", "#n", 'a"b', "", "x" * 99 + " y"],
)
def test_names_that_would_end_an_argument_are_spelled_out(name: str) -> None:
    tokenizer = tokenizer_of_family("lfm2")
    model = Model("lfm2", tokenizer, tokenizer.chat_template)
    schema = {"a": {"const": 1}, name: {"type": "integer", "maximum": 5}}
    tools = [tool("look", schema, ["a", name])]
    for seed in range(8):
        text = model.texts.write(model.grammar(REQUIRED, tools), seed, 900)
        assert text is not None
        (call,) = read(model.syntax, text, tools).parsed[:1]
        assert [*call[1]] == ["a", name]
    with pytest.raises(ValueError, match="cannot be read"):
        model.grammar(REQUIRED, [tool("look,", {}, [])])


@pytest.mark.parametrize("family", ["qwen3-coder", "deepseek-v3.2", "minimax-m2"])
def test_names_that_would_end_their_tag_are_held_in_no_grammar(family: str) -> None:
    """It is said to the client, and the model writes what it wants."""
    tokenizer = tokenizer_of_family(family)
    model = Model(family, tokenizer, str(tokenizer.chat_template or ""))
    for name in ("", "a>b"):
        with pytest.raises(ValueError, match="name"):
            model.grammar(REQUIRED, [tool("look", {name: {}}, [])])


def test_many_odd_names_are_told_apart() -> None:
    """Within values that are no literals too, and beside comments."""
    tokenizer = tokenizer_of_family("lfm2")
    model = Model("lfm2", tokenizer, tokenizer.chat_template)
    tools = [tool(f"go-{number}", {}, []) for number in range(30)]
    tools.append(tool("plan", {"a": {"type": "string"}}, []))
    calls = [f'plan(a=go-{number}("x"))' for number in range(30)]
    text = f"<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>"
    found = [arguments for _, arguments in read(model.syntax, text, tools).parsed]
    assert found == [{"a": f'go-{number}("x")'} for number in range(30)]
    inside = '[plan(a="go-1(x)", # "\n b="go-2(x)", # "\n c=2), go-3() # go-4(\n]'
    text = f"<|tool_call_start|>{inside}<|tool_call_end|>"
    said = {"a": "go-1(x)", "b": "go-2(x)", "c": 2}
    assert read(model.syntax, text, tools).parsed == [("plan", said), ("go-3", {})]


CITY = tool("look", {"at": {"type": "string"}, "times": {"type": "integer"}}, ["at"])
MARKED = 'a </parameter> b </arg_value> "q" [ARGS] é\n'


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "qwen3",
            '<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call>',
        ),
        (
            "qwen3-coder",
            "<tool_call>\n<function=look>\n<parameter=at>\n<b>\n</parameter>\n"
            "<parameter=times>\n5\n</parameter>\n</function>\n</tool_call>",
        ),
        (
            "glm4.6",
            "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>x\ny</arg_value>\n"
            "</tool_call>",
        ),
        ("llama3.1", '{"name": "look", "parameters": {"at": "x"}}'),
        ("devstral", '[TOOL_CALLS]look[ARGS]{"at": "x", "times": 5}'),
        (
            "mistral-nemo",
            '[TOOL_CALLS][{"name": "look", "arguments": {"at": "x"}, '
            '"id": "a1B2c3D4e"}]',
        ),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>"
            'commentary to=functions.look <|constrain|>json<|message|>{"at": "x"}',
        ),
        (
            "kimi-k2",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:12"
            '<|tool_call_argument_begin|>{"at": "x"}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
        ),
        (
            "deepseek-v3",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
            '{"at": "x"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "deepseek-v3.1",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
            '{"at": "x"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        (
            "deepseek-v3.2",
            '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look">\n'
            '<｜DSML｜parameter name="at" string="true">a </b> c</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="times" string="false">5</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ),
        (
            "minimax-m2",
            '<minimax:tool_call>\n<invoke name="look">\n<parameter name="at">a </b>'
            "</parameter>\n</invoke>\n</minimax:tool_call>",
        ),
        ("gemma4", '<|tool_call>call:look{at:<|"|>a}, b<|"|>,times:5}<tool_call|>'),
        ("lfm2", "<|tool_call_start|>[look(at='it\\'s', times=5)]<|tool_call_end|>"),
        (
            "nemotron-nano-v2",
            '<TOOLCALL>[{"name": "look", "arguments": {"at": "x"}}]</TOOLCALL>',
        ),
    ],
)  # fmt: skip
def test_a_call_as_its_model_writes_it_is_let_in(family: str, text: str) -> None:
    """Nothing keeps a model from the form that it was trained on."""
    tokenizer = tokenizer_of_family(family)
    model = Model(family, tokenizer, str(tokenizer.chat_template))
    assert model.texts.takes(model.grammar(REQUIRED, (CITY,)), text)


REFERRED = Tool(
    "look",
    {
        "type": "object",
        "properties": {
            "at": {"$ref": "#/$defs/point"},
            "id": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "required": ["at", "id"],
        "$defs": {
            "point": {
                "type": "object",
                "properties": {"x": {"type": "integer", "maximum": 9}},
                "required": ["x"],
                "additionalProperties": False,
            }
        },
    },
    {},
)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-coder", "glm4.6", "deepseek-v3.2"])
def test_what_can_be_no_text_is_json_of_its_schema(family: str) -> None:
    """Behind a reference too, and where it is one of several."""
    tokenizer = tokenizer_of_family(family)
    model = Model(family, tokenizer, str(tokenizer.chat_template))
    grammar, found = model.grammar(ToolChoice("named", "look"), (REFERRED,)), 0
    for seed in range(20):
        text = model.texts.write(grammar, seed)
        if text is not None:
            [(_, arguments)] = read(model.syntax, text, (REFERRED,)).parsed
            jsonschema.validate(arguments, dict(REFERRED.parameters))
            found += 1
    assert found > 2
