"""
Chat templates as models come with them, each with a tokenizer that has its tokens.

The vocabulary is the built-in model's; the added tokens are those that the template
names. Each row says how its model writes thinking and calls.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer

from sidecar.core.requests import ToolCall
from sidecar.pipeline.prepare import PreparedPrompt
from testkit.chat_templates import BUILTIN, write_template
from testkit.chats import Chats, Client, Said

FOLDER = Path(__file__).parents[1] / "tests/fixtures" / "chat_templates"
_TOKEN = re.compile(
    r"<[|｜][^<>|｜\s'{}]*[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|\]~!?b\[?\]?|\[e~\["
    r"|\[/?(?:INST|THINK|ARGS|CALL_ID|IMG|[A-Z]+_[A-Z]+|gMASK)\]|<sop>"
    r"|</?(?:think|tool_call|tool_response|minimax:tool_call|seed:[a-z_]+|s)>"
    r"|<(?:start|end)_of_turn>|<bos>|<eos>|[｜]DSML[｜]"
)
Write = Callable[[Sequence[ToolCall]], str]


@dataclass(frozen=True, slots=True)
class Family:
    """
    One model family.

    Args:
        calls: the calls as its model writes them.
        think: opening and closing text of its thinking; None: it does not think.
        tokens: that the template does not name. bos, eos: empty means none.
        stops: stop tokens besides `eos`.
        extra: keys of the tokenizer's configuration.
        parallel: it writes several calls in one turn.
        reorders: what a new user message moves in the prompt, if anything.
        whole: the whole turn as it writes it, where that is not one behind the other.
        late_text: its template prints a turn's text behind the results of its calls.
    """

    name: str
    calls: Write
    think: tuple[str, str] | None = None
    tokens: tuple[str, ...] = ()
    bos: str = ""
    eos: str = "<|im_end|>"
    stops: tuple[str, ...] = ()
    extra: tuple[tuple[str, str], ...] = ()
    parallel: bool = True
    reorders: str = ""
    late_text: bool = False
    whole: Callable[[Said], str] | None = None

    @property
    def template(self) -> str:
        """The template's text; empty if it is code of the library's."""
        file = FOLDER / f"{self.name}.jinja"
        return file.read_text() if file.exists() else ""

    def write(self, said: Said, prompt: str) -> str:
        """A turn as the model writes it behind a prompt, without the stop token."""
        if self.whole is not None:
            return self.whole(said)
        text = said.text + self.calls(said.calls) if said.calls else said.text
        if not said.reasoning or self.think is None:
            return text
        opened, closed = self.think
        begun = prompt.rstrip().endswith(opened.strip())
        return f"{'' if begun else opened}{said.reasoning}{closed}{text}"


def _hermes(calls: Sequence[ToolCall]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{c.name}", "arguments": {c.arguments}}}\n</tool_call>'
        for c in calls
    )


def _tojson(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json(value: Any) -> str:
    return value if isinstance(value, str) else _tojson(value)


def _items(
    call: ToolCall, print_value: Callable[[Any], str] = _json
) -> list[tuple[str, str]]:
    pairs = json.loads(call.arguments).items()
    return [(name, print_value(value)) for name, value in pairs]


def _python_scalar(value: Any) -> str:
    return _tojson(value) if isinstance(value, dict | list) else str(value)


def _xml(
    calls: Sequence[ToolCall],
    print_value: Callable[[Any], str] = _python_scalar,
    pad: str = "\n",
) -> str:
    blocks = []
    for call in calls:
        inside = "".join(
            f"<parameter={k}>{pad}{v}{pad}</parameter>\n"
            for k, v in _items(call, print_value)
        )
        blocks.append(
            f"<tool_call>\n<function={call.name}>\n{inside}</function>\n</tool_call>"
        )
    return "\n".join(blocks)


def _xml_json(calls: Sequence[ToolCall]) -> str:
    return _xml(calls, _json)


def _seed(calls: Sequence[ToolCall]) -> str:
    return _xml(calls, str, "").replace("tool_call>", "seed:tool_call>")


def _glm(calls: Sequence[ToolCall]) -> str:
    return "".join(
        f"\n<tool_call>{c.name}\n"
        + "".join(
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n"
            for k, v in _items(c)
        )
        + "</tool_call>"
        for c in calls
    )


def _glm_tight(calls: Sequence[ToolCall]) -> str:
    return "".join(
        f"<tool_call>{c.name}"
        + "".join(
            f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in _items(c)
        )
        + "</tool_call>"
        for c in calls
    )


def _llama(calls: Sequence[ToolCall]) -> str:
    return "\n" + "; ".join(
        f'{{"name": "{c.name}", "parameters": {c.arguments}}}' for c in calls
    )


def _mistral_list(calls: Sequence[ToolCall]) -> str:
    listed = [
        f'{{"name": "{c.name}", "arguments": {c.arguments}, "id": "q{n:08}"}}'
        for n, c in enumerate(calls)
    ]
    return f"[TOOL_CALLS][{', '.join(listed)}]"


def _mistral(calls: Sequence[ToolCall]) -> str:
    return "".join(f"[TOOL_CALLS]{c.name}[ARGS]{c.arguments}" for c in calls)


def _mistral_ids(calls: Sequence[ToolCall]) -> str:
    return "".join(
        f"[TOOL_CALLS]{c.name}[CALL_ID]q{n:08}[ARGS]{c.arguments}"
        for n, c in enumerate(calls)
    )


def _deepseek(calls: Sequence[ToolCall]) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>{c.name}<｜tool▁sep｜>{c.arguments}<｜tool▁call▁end｜>"
        for c in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _deepseek_fenced(calls: Sequence[ToolCall]) -> str:
    inside = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{c.name}\n```json\n{c.arguments}\n```"
        "<｜tool▁call▁end｜>"
        for c in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _dsml(calls: Sequence[ToolCall]) -> str:
    blocks = []
    for call in calls:
        inside = "".join(
            f'<｜DSML｜parameter name="{k}" string="'
            f'{str(isinstance(v, str)).lower()}">'
            f"{_json(v)}</｜DSML｜parameter>\n"
            for k, v in json.loads(call.arguments).items()
        )
        blocks.append(
            f'<｜DSML｜invoke name="{call.name}">\n{inside}</｜DSML｜invoke>\n'
        )
    return f"\n\n<｜DSML｜function_calls>\n{''.join(blocks)}</｜DSML｜function_calls>"


def _gemma(calls: Sequence[ToolCall]) -> str:
    def said(value: Any) -> str:
        if isinstance(value, list):
            return f"[{','.join(map(said, value))}]"
        if isinstance(value, str):
            return f'<|"|>{value}<|"|>'
        return "None" if value is None else json.dumps(value)

    return "".join(
        f"<|tool_call>call:{c.name}{{"
        + ",".join(f"{k}:{said(v)}" for k, v in sorted(json.loads(c.arguments).items()))
        + "}<tool_call|>"
        for c in calls
    )


def _harmony(said: Said) -> str:
    """Messages on channels; the prompt holds the first one's role."""
    written = []
    if said.reasoning:
        written.append(f"<|channel|>analysis<|message|>{said.reasoning}")
    if said.text:
        channel = "commentary" if said.calls else "final"
        written.append(f"<|channel|>{channel}<|message|>{said.text}")
    written += [
        f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
        f"{call.arguments}"
        for call in said.calls
    ]
    return "<|end|><|start|>assistant".join(written)


def _kimi(calls: Sequence[ToolCall]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{c.name}:{n}<|tool_call_argument_begin|>"
        f"{c.arguments}<|tool_call_end|>"
        for n, c in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def _minimax(calls: Sequence[ToolCall]) -> str:
    inside = "".join(
        f'<invoke name="{c.name}">\n'
        + "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in _items(c))
        + "</invoke>\n"
        for c in calls
    )
    return f"\n<minimax:tool_call>\n{inside}</minimax:tool_call>"


def _liquid(calls: Sequence[ToolCall]) -> str:
    def value(said: Any) -> str:
        if isinstance(said, dict | list):
            return _tojson(said)
        if not isinstance(said, str):
            return str(said)
        escapes = {"\\": "\\\\", "'": "\\'", "\n": "\\n", "\r": "\\r"}
        return f"'{''.join(escapes.get(char, char) for char in said)}'"

    def said(call: ToolCall) -> str:
        pairs = json.loads(call.arguments).items()
        return f"{call.name}({', '.join(f'{k}={value(v)}' for k, v in pairs)})"

    listed = ", ".join(map(said, calls))
    return f"<|tool_call_start|>[{listed}]<|tool_call_end|>"


def _toolcall(calls: Sequence[ToolCall]) -> str:
    listed = ", ".join(
        f'{{"name": "{c.name}", "arguments": {c.arguments}}}' for c in calls
    )
    return f"<TOOLCALL>[{listed}]</TOOLCALL>"


_THINK = ("<think>\n", "\n</think>\n\n")
_TIGHT = ("<think>", "</think>")
_LLAMA = ("<|begin_of_text|>", "<|eot_id|>")
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_MISTRAL = ("<s>", "</s>")
_GLM_STOPS = ("<|user|>", "<|observation|>")
_GEMMA_THINK = ("<|channel>thought\n", "\n<channel|>")
_TOOLS_MOVE = "the offered tools stand before the last user message"
FAMILIES = [
    Family("qwen2.5", _hermes),
    Family("qwen3", _hermes, _THINK),
    Family("qwen3-coder", _xml),
    Family("qwen3.5", _xml, _THINK),
    Family("qwen3.6", _xml_json, _THINK),
    Family("qwen3.8", _xml_json, _THINK),
    Family("llama3.1", _llama, None, (), *_LLAMA, parallel=False),
    Family("llama3.2", _llama, None, (), *_LLAMA),
    Family("mistral-nemo", _mistral_list, None, (), *_MISTRAL,
           reorders=_TOOLS_MOVE),
    Family("mistral-small-3.2", _mistral_ids, None, (), *_MISTRAL,
           reorders=_TOOLS_MOVE),
    Family("ministral-3", _mistral, ("[THINK]", "[/THINK]"), (), *_MISTRAL),
    Family("devstral", _mistral, None, (), *_MISTRAL),
    Family("deepseek-v3", _deepseek_fenced, _TIGHT, (), *_DEEPSEEK),
    Family("deepseek-v3.1", _deepseek, _TIGHT, (), *_DEEPSEEK),
    Family("deepseek-v3.2", _dsml, _TIGHT, (), *_DEEPSEEK),
    Family("deepseek-v3.2-mlx", _dsml, _TIGHT,
           ("<think>", "</think>", "｜DSML｜", "<｜User｜>", "<｜Assistant｜>"),
           *_DEEPSEEK, extra=(("chat_template_type", "deepseek_v32"),)),
    Family("deepseek-r1-distill", _deepseek_fenced, _THINK, (), *_DEEPSEEK),
    Family("gemma3", _hermes, None, (), "<bos>", "<end_of_turn>"),
    Family("gemma4", _gemma, _GEMMA_THINK, (), "<bos>", "<turn|>",
           ("<|tool_response>",), late_text=True),
    Family("gemma4-e2b", _gemma, _GEMMA_THINK, (), "<bos>", "<turn|>",
           ("<|tool_response>",), late_text=True),
    Family("glm4.5", _glm, ("\n<think>", "</think>\n"), eos="<|endoftext|>",
           stops=_GLM_STOPS),
    Family("glm4.6", _glm, ("\n<think>", "</think>\n"), eos="<|endoftext|>",
           stops=_GLM_STOPS),
    Family("glm4.7", _glm_tight, _TIGHT, eos="<|endoftext|>", stops=_GLM_STOPS),
    Family("gpt-oss", _hermes, ("", ""), ("<|constrain|>",), "<|startoftext|>",
           "<|return|>", ("<|call|>",), parallel=False, whole=_harmony),
    Family("kimi-k2", _kimi),
    Family("kimi-k2-thinking", _kimi, _TIGHT),
    Family("minimax-m2", _minimax, _THINK, eos="[e~["),
    Family("granite-4.0", _hermes, eos="<|end_of_text|>"),
    Family("lfm2", _liquid, None, (), "<|startoftext|>"),
    Family("nemotron-3", _xml, ("<think>\n", "\n</think>\n")),
    Family("seed-oss", _seed, ("<seed:think>", "</seed:think>"), (),
           "<seed:bos>", "<seed:eos>"),
    Family("smollm3", _hermes, _THINK),
    Family("nemotron-nano-v2", _toolcall, ("<think>\n", "\n</think>\n"),
           eos="<SPECIAL_12>", tokens=("<SPECIAL_11>", "<think>", "</think>")),
    Family("step-3.5", _xml, ("<think>\n", "\n</think>\n")),
    Family("phi-3.5", _hermes, eos="<|end|>"),
]  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}


@cache
def tokenizer_of_family(name: str) -> Any:
    """A tokenizer with the family's template and added tokens, loaded as a model's."""
    family = BY_NAME[name]
    folder = Path(mkdtemp(prefix=f"tokenizer-{name}-"))
    try:
        write_tokenizer(folder, family)
        loaded = load_tokenizer(folder)
        vocab = loaded.get_vocab()
        for token in family.stops:
            loaded.add_eos_token(str(vocab[token]))
        return loaded
    finally:
        shutil.rmtree(folder)


def write_tokenizer(folder: Path, family: Family) -> tuple[str, ...]:
    """Put the family's tokenizer and template into a folder; what ends its turns."""
    template = family.template
    config = write_template(folder, template or None)
    named = {*_TOKEN.findall(template), *family.tokens, family.bos, family.eos}
    tokens = sorted({*named, *family.stops} - {""})
    core = Tokenizer.from_str(_renamed_tokens(named))
    core.add_special_tokens([AddedToken(token, special=True) for token in tokens])
    config |= {"eos_token": family.eos, "bos_token": family.bos or None}
    config["pad_token"] = family.eos  # one that is not there would be added
    config |= dict(family.extra)
    core.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return family.eos, *family.stops


def _renamed_tokens(named: set[str]) -> str:
    """The built-in model's tokenizer, without those added tokens that are not named."""
    made = json.loads((BUILTIN / "tokenizer.json").read_text())
    for number, token in enumerate(made["added_tokens"]):
        if token["content"] not in named:
            token["content"] = f"<unused{number}>"
    return json.dumps(made)


class FamilyChats(Chats):
    """Conversations with a model of one family, which writes as it does."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.family = BY_NAME[name]
        super().__init__(name, tokenizer=tokenizer_of_family(name), **settings)
        added = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        self._added = re.compile(f"({'|'.join(map(re.escape, added))})")

    def answer(
        self,
        prompt: PreparedPrompt,
        said: Said,
        *,
        raw: str | None = None,
        sampled: Sequence[int] | None = None,
    ) -> tuple[int, ...]:
        """Finish a turn, written as this family does."""
        raw = self.family.write(said, prompt.text) if raw is None else raw
        return super().answer(prompt, said, raw=raw, sampled=sampled)

    def sample(self, raw: str) -> tuple[int, ...]:
        """As a model may cut it: added tokens whole, text in any way."""
        ids: list[int] = []
        for piece in self._added.split(raw):
            if self._added.fullmatch(piece):
                ids += self.tokenizer.encode(piece, add_special_tokens=False)
            else:
                ids += super().sample(piece)
        return tuple(ids)

    def rendered(self, messages: Sequence[Any], client: Client) -> str:
        """What the template makes of the conversation, nothing spliced or pinned."""
        kwargs: dict[str, Any] = {"enable_thinking": bool(client.thinking)}
        template = self.pipeline.template
        if template.traits.preserve_thinking:
            kwargs["preserve_thinking"] = True
        return template.render(messages, client.tools, kwargs)
