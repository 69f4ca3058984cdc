"""An answer that its client began: what is remembered of it, and what it holds."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from sidecar.engine.job import Job
from testkit.real_templates import BY_NAME, Family, write_tokenizer
from testkit.scripted import Forced, Prompt, scripted
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model

Json = dict[str, Any]
SYSTEM = {"role": "system", "content": "Rules. " + "word " * 60}
HI = {"role": "user", "content": "hi"}
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look"}}]


class _Model:
    """Says what its last prompt's system text asks for; keeps the prompts' texts."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.says = ""

    def __call__(self, prompt: Prompt) -> str:
        self.prompts.append(prompt.text)
        return self.says


@pytest.fixture
def model() -> _Model:
    return _Model()


@pytest.fixture
def http(model: _Model) -> Iterator[httpx.Client]:
    settings = {"CACHE_SELFTEST": "off"}
    with (
        running_sidecar(settings, scripted(model)) as app,
        httpx.Client(base_url=app.url, timeout=60) as client,
    ):
        yield client


def ask(http: httpx.Client, session: str | None, *talk: Json, **more: Any) -> Json:
    body = {"messages": [SYSTEM, *talk], "session_id": session, **more}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    message: Json = answer.json()["choices"][0]["message"]
    return message


@pytest.mark.parametrize("others", ["t", "s", None])
@pytest.mark.parametrize("is_first", [True, False])
def test_thoughts_of_an_equal_answer_are_not_put_behind_it(
    http: httpx.Client, model: _Model, others: str | None, *, is_first: bool
) -> None:
    """Its client was shown the whole, of which the model wrote the end alone."""
    begun = {"role": "assistant", "content": "One, two"}

    def think() -> None:
        model.says = "<think>\nI count.\n</think>\n\nOne, two and three."
        assert ask(http, others, HI)["reasoning_content"].strip() == "I count."

    def begin() -> None:
        model.says = " and three."
        told = ask(http, "s", HI, begun, continue_final_message=True)
        assert told["content"] == " and three."

    for act in (think, begin) if is_first else (begin, think):
        act()
    whole = {"role": "assistant", "content": "One, two and three."}
    model.says = "Bye."
    ask(http, "s", HI, whole, {"role": "user", "content": "and now?"})
    assert "One, two and three." in model.prompts[-1]
    if others == "s" and not is_first:
        return  # its newest try, and its own thoughts
    assert "I count." not in model.prompts[-1]


def test_an_own_answer_that_says_what_follows_a_begun_one_keeps_its_thoughts(
    http: httpx.Client, model: _Model
) -> None:
    model.says = "<think>\nI count.\n</think>\n\nand three."
    ask(http, "s", HI)
    model.says = "and three."
    begun = {"role": "assistant", "content": "One, two "}
    ask(http, "s", HI, begun, continue_final_message=True)
    whole = {"role": "assistant", "content": "and three."}
    model.says = "Bye."
    ask(http, "s", HI, whole, {"role": "user", "content": "and now?"})
    assert "I count." in model.prompts[-1]


@pytest.mark.parametrize(("begun", "is_call"), [("In `", False), ("So: ", True)])
def test_a_call_in_code_that_the_client_opened_is_spoken_of(
    http: httpx.Client, model: _Model, begun: str, *, is_call: bool
) -> None:
    model.says = CALL
    last = {"role": "assistant", "content": begun, "prefix": True}
    message = ask(http, "s", HI, last, tools=TOOLS)
    assert bool(message.get("tool_calls")) is is_call
    assert message["content"] == (None if is_call else CALL)


class _FamilyModel:
    """Says what it is told to, in the tokens of a family."""

    def __init__(self, folder: Path, family: Family) -> None:
        write = functools.partial(write_tokenizer, family=family)
        self.folder = make_model(folder, "dense", hidden=32, write_tokenizer=write)
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._end = self._tokenizer.token_to_id(family.eos)
        self.says, self.prompt = "", ""

    def __call__(self, job: Job, _choice: int) -> list[Forced]:
        read = list(job.spec.model_ids)
        self.prompt = self._tokenizer.decode(read, skip_special_tokens=False)
        ids = self._tokenizer.encode(self.says, add_special_tokens=False).ids
        return [Forced([*ids, self._end])]


@pytest.mark.parametrize("name", ["qwen2.5", "llama3.1", "gemma3", "devstral"])
def test_what_the_client_began_stands_in_the_next_prompt(
    name: str, tmp_path: Path
) -> None:
    """Where nothing of a template stands between the role and the answer, too."""
    model = _FamilyModel(tmp_path / "model", BY_NAME[name])
    settings = {"CACHE_SELFTEST": "off", "MODEL_PATH": str(model.folder)}
    whole = {"role": "assistant", "content": "Begun words and the rest."}
    begun = {"role": "assistant", "content": "Begun words"}
    off = {"enable_thinking": False, "max_tokens": 60}
    with (
        running_sidecar(settings, model) as app,
        httpx.Client(base_url=app.url, timeout=60) as http,
    ):
        for session in (None, "s"):
            model.says = " and the rest."
            hello = {"role": "user", "content": f"hi {session}"}
            ask(http, session, hello, begun, continue_final_message=True, **off)
            model.says = "Bye."
            ask(http, session, hello, whole, {"role": "user", "content": "go"}, **off)
            assert "Begun words and the rest." in model.prompt
