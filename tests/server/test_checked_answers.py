"""JSON that no grammar holds is checked when it is there, and asked for once more."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from sidecar.app import App
from sidecar.core.requests import OutputFormat
from sidecar.infra.limited_child import ChildBusy
from sidecar.output import answer_check
from sidecar.output.answer_check import AnswerCheck, check
from sidecar.output.json_check import found
from sidecar.service import checked_answer
from sidecar.service.turn import IGNORED
from testkit.scripted import Answer, Call, Prompt, Switch, render, scripted
from testkit.servers import running_sidecar

Json = dict[str, Any]
TALK: list[Any] = [{"role": "user", "content": "Count the lamps."}]
SETS = {
    "type": "object",
    "properties": {
        "lamps": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    },
    "required": ["lamps"],
    "additionalProperties": False,
}
SIDES = {
    "type": "object",
    "properties": {"lit": {"type": "boolean"}, "num": {"type": ["integer", "null"]}},
    "required": ["lit"],
}


class Served:
    """A server whose model says what a test decides, answer by answer."""

    def __init__(self, app: App, switch: Switch) -> None:
        self.app = app
        self.switch = switch

    def says(self, *answers: str) -> None:
        """What the model writes from here on, one text an answer."""
        left = list(answers)
        self.switch.prompts.clear()
        self.switch.script = lambda prompt: left.pop(0)

    def ask(
        self,
        schema: Json,
        *,
        is_strict: bool = True,
        headers: dict[str, str] | None = None,
        **more: Any,
    ) -> httpx.Response:
        form = {"name": "lamps", "schema": schema, "strict": is_strict}
        body = {
            "model": "local",
            "messages": TALK,
            "response_format": {"type": "json_schema", "json_schema": form},
            **more,
        }
        url = f"{self.app.url}/v1/chat/completions"
        return httpx.post(url, json=body, headers=headers, timeout=120)


def _served(model: Path, **settings: str) -> Iterator[Served]:
    switch = Switch()
    given = {"MODEL_PATH": str(model), "CACHE_SELFTEST": "off", **settings}
    with running_sidecar(given, scripted(switch)) as app:
        yield Served(app, switch)


@pytest.fixture(scope="module")
def checked(model_folder: Callable[[str], Path]) -> Iterator[Served]:
    """One that checks all answers."""
    yield from _served(model_folder("dense"), SO_MODE="validate")


@pytest.fixture(scope="module")
def held(model_folder: Callable[[str], Path]) -> Iterator[Served]:
    """One that holds answers to what its grammars know."""
    yield from _served(model_folder("dense"))


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("written", "sent"),
    [
        ('{"lit": true, "num": 3}', '{"lit": true, "num": 3}'),
        ('{ "lit":true }', '{ "lit":true }'),
        ('Sure:\n```json\n{"lit": false}\n```\nDone.', '{"lit": false}'),
        ('{"lit": "true", "num": "null"}', '{"lit": true, "num": null}'),
        ('{"lit": "false", "num": "17"}', '{"lit": false, "num": 17}'),
        ('as [asked] {"lit": true}', '{"lit": true}'),
        ('As per [1]:\n```json\n{"lit": true}\n```', '{"lit": true}'),
        ('It is 5" {"lit": true,  "num": 17}', '{"lit": true,  "num": 17}'),
        ('So: {"lit": true, "x": "\\ud83d"}', '{"lit": true, "x": "\\ud83d"}'),
        ('{"lit": "true", "x": "\\ud83d"}', '{"lit": true, "x": "\\ud83d"}'),
    ],
)
def test_json_of_the_schema_is_sent_and_nothing_else(
    checked: Served, written: str, sent: str
) -> None:
    checked.says(written)
    answer = checked.ask(SIDES)
    assert text_of(answer) == sent
    assert IGNORED not in answer.headers
    assert len(checked.switch.prompts) == 1


@pytest.mark.parametrize(
    "broken",
    [
        '[{"lit": true}, {"lit": false},]',
        '{"answer": {"lit": true}',
        "{'user': {\"lit\": true}, 'x': 2}",
        '{"lit": true, "num": 1e999}',
        '{"lit": true, "num": "1e999"}',
        '{"lit": true}}, "num": 5}',
        '{"lit": true}, {"lit": false}',
        '{"lit": true, "x": "type "}" to end"}',
        '{"x": "Here:\n```json\n{"lit": true}\n```\nDone."}',
        "{'c': '}', 'in': {\"lit\": true}}",
        '{"lit": true}")',
        '"num": 1, "in": {"lit": true}',
    ],
)
def test_a_part_of_what_is_broken_is_no_answer(checked: Served, broken: str) -> None:
    checked.says(broken, '{"lit": false}')
    assert text_of(checked.ask(SIDES)) == '{"lit": false}'
    assert len(checked.switch.prompts) == 2


def test_a_wrong_answer_is_asked_for_once_more(checked: Served) -> None:
    checked.says('{"lit": 7}', '{"lit": true}')
    answer = checked.ask(SIDES)
    assert text_of(answer) == '{"lit": true}'
    first, second = checked.switch.prompts
    assert [turn.role for turn in second.turns[-2:]] == ["assistant", "user"]
    assert second.turns[-2].text == '{"lit": 7}'
    assert "7 is not of type 'boolean'" in second.turns[-1].text
    assert "$.lit" in second.turns[-1].text
    usage = answer.json()["usage"]
    num_read = len(first.text) + len(second.text)
    assert usage["prompt_tokens"] > num_read // 12  # that of both prompts
    assert usage["completion_tokens"] >= 2 * 5


def test_a_strict_schema_that_is_missed_twice_is_an_error(checked: Served) -> None:
    checked.says('{"lit": 7}', "I cannot.")
    answer = checked.ask(SIDES)
    assert answer.status_code == 422
    body = answer.json()
    assert body["error"]["code"] == "answer_invalid"
    assert body["error"]["param"] == "response_format.json_schema.schema"
    assert body["error_path"] == "$"
    checked.says('{"lit": 7}', '{"lit": true, "num": 0.5}')
    answer = checked.ask(SIDES)
    assert answer.json()["error_path"] == "$.num"
    assert "0.5" not in answer.json()["error"]["message"]


def test_a_schema_that_is_not_strict_gives_the_text_then(checked: Served) -> None:
    checked.says('{"lit": 7}', "I cannot.")
    answer = checked.ask(SIDES, is_strict=False)
    assert text_of(answer) == "I cannot."
    assert "response_format" in answer.headers[IGNORED]


def test_a_stream_sends_no_text_before_it_is_right(checked: Served) -> None:
    checked.says("<think>\nhm\n</think>\nWell, no.", '{"lit": true}')
    with openai.OpenAI(base_url=f"{checked.app.url}/v1", api_key="none") as client:
        form: Any = {"name": "x", "schema": SIDES, "strict": True}
        with client.chat.completions.create(
            model="local",
            messages=TALK,
            stream=True,
            stream_options={"include_usage": True},
            response_format={"type": "json_schema", "json_schema": form},
        ) as stream:
            chunks = list(stream)
        texts = [c.choices[0].delta.content for c in chunks if c.choices]
        assert "".join(filter(None, texts)) == '{"lit": true}'
        (usage,) = [c.usage for c in chunks if c.usage is not None]
        assert usage.completion_tokens > 10
        checked.says("no", "no")
        with pytest.raises(openai.APIError, match="does not keep to response_format"):
            for _ in client.chat.completions.create(
                model="local",
                messages=TALK,
                stream=True,
                response_format={"type": "json_schema", "json_schema": form},
            ):
                pass


def test_an_answer_that_was_cut_is_sent_as_it_is(checked: Served) -> None:
    checked.says('{"lit": true, "num": 1}')
    answer = checked.ask(SIDES, max_tokens=3)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert text_of(answer)
    assert len(checked.switch.prompts) == 1


def test_a_call_is_sent_as_it_is(checked: Served) -> None:
    def calls(prompt: Prompt) -> str:
        return render(Answer(calls=(Call("look", {"at": "it"}),)), prompt)

    checked.switch.script = calls
    function = {"name": "look", "parameters": {"type": "object"}}
    answer = checked.ask(SIDES, tools=[{"type": "function", "function": function}])
    choice = answer.json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "look"


def test_several_answers_are_checked_one_by_one(checked: Served) -> None:
    checked.says('```\n{"lit": true}\n```', '{"lit": false}')
    answer = checked.ask(SIDES, n=2)
    texts = [c["message"]["content"] for c in answer.json()["choices"]]
    assert sorted(texts) == ['{"lit": false}', '{"lit": true}']


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "strin"}, "$.type"),
        ({"$ref": "http://127.0.0.1:9/schema"}, "leads nowhere"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, "leads nowhere"),
    ],
)
def test_what_is_no_schema_is_refused(checked: Served, schema: Json, said: str) -> None:
    answer = checked.ask(schema)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_schema"
    assert said in answer.json()["error"]["message"]


def test_a_costly_pattern_costs_two_seconds_of_a_process(checked: Served) -> None:
    checked.says('{"a": "' + "a" * 60 + 'b"}')
    schema = {"properties": {"a": {"pattern": "^(a+)+$"}}}
    answer = checked.ask(schema)
    assert answer.status_code == 422
    assert "could not be checked" in answer.json()["error"]["message"]
    assert httpx.get(f"{checked.app.url}/health", timeout=10).status_code == 200


def opening(session: str) -> list[Json]:
    """A talk of words that no other test says: what it was answered is its own."""
    return [{"role": "user", "content": f"Count the lamps of house {session}."}]


def go_on(served: Served, sent: str, session: str) -> httpx.Response:
    """The next question of a talk whose last answer was `sent`."""
    served.says("Fine.")
    talk = [*opening(session), {"role": "assistant", "content": sent}]
    body = {
        "model": "local",
        "messages": [*talk, {"role": "user", "content": "So?"}],
        "session_id": session,
    }
    answer = httpx.post(f"{served.app.url}/v1/chat/completions", json=body, timeout=120)
    assert text_of(answer) == "Fine."
    return answer


def test_what_was_sent_is_what_is_gone_on_from(checked: Served) -> None:
    """The model's own words were other ones: they are not put in their place."""
    checked.says("<think>\nhm\n</think>\nWell, no.", '{"lit": true}')
    sent = text_of(checked.ask(SIDES, session_id="one", messages=opening("one")))
    answer = go_on(checked, sent, "one")
    (prompt,) = checked.switch.prompts
    turns = [(turn.role, turn.text) for turn in prompt.turns if turn.role != "system"]
    asked = ("user", opening("one")[0]["content"])
    assert turns[:3] == [asked, ("assistant", sent), ("user", "So?")]
    assert "Well, no" not in prompt.text
    assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_text_around_the_json_is_not_put_back(checked: Served) -> None:
    """Nor is the thinking of an older turn that looked as what is sent does now."""
    checked.says('<think>\nold\n</think>\n{"lit": true}')
    checked.ask(SIDES, session_id="two", messages=opening("two"))
    checked.says('<think>\nnew\n</think>\nIt is:\n{"lit": true}')
    sent = text_of(checked.ask(SIDES, session_id="two", messages=opening("two")))
    assert sent == '{"lit": true}'
    go_on(checked, sent, "two")
    (prompt,) = checked.switch.prompts
    assert "It is" not in prompt.text
    assert "old" not in prompt.text


def test_an_answer_of_the_schema_is_put_back_as_it_was_sampled(checked: Served) -> None:
    checked.says('<think>\nhm\n</think>\n{"lit": true}')
    go_on(
        checked,
        text_of(checked.ask(SIDES, session_id="three", messages=opening("three"))),
        "three",
    )
    assert "<think>\nhm" in checked.switch.prompts[0].text


def test_what_a_grammar_passes_over_is_checked(held: Served) -> None:
    held.says('{"lamps": [1, 1]}', '{"lamps": [1, 2]}')
    answer = held.ask(SETS, is_strict=False)
    assert text_of(answer) == '{"lamps": [1, 2]}'
    assert "non-unique" in held.switch.prompts[1].turns[-1].text
    assert held.ask(SETS).status_code == 400  # strict: refused, as it cannot be held


def test_a_schema_that_no_grammar_knows_is_checked_if_it_is_not_strict(
    held: Served,
) -> None:
    schema = {"not": {"type": "object"}}
    held.says("{}", "[5]")
    assert text_of(held.ask(schema, is_strict=False)) == "[5]"


def test_an_answer_that_cannot_be_asked_for_again_is_what_there_is(
    model_folder: Callable[[str], Path],
) -> None:
    """There is no room for both prompts, but there was for the client's own."""
    small = {"MAX_KV_SIZE": "150", "SO_MODE": "validate"}
    wrong = "It is " + "very " * 40
    for served in _served(model_folder("dense"), **small):
        served.says(wrong)
        answer = served.ask(SIDES, is_strict=False)
        assert text_of(answer) == wrong.strip()
        served.says(wrong)
        answer = served.ask(SIDES)
        assert answer.status_code == 422
        assert answer.json()["error"]["code"] == "answer_invalid"
        assert "context" not in answer.text


def test_an_answer_is_asked_for_again_in_its_own_place(
    model_folder: Callable[[str], Path],
) -> None:
    alone = {"MAX_CONCURRENT_REQUESTS": "1", "MAX_QUEUED_REQUESTS": "0"}
    for served in _served(model_folder("dense"), SO_MODE="validate", **alone):
        for _ in range(3):
            served.says("no", '{"lit": true}')
            assert text_of(served.ask(SIDES)) == '{"lit": true}'


@pytest.mark.parametrize("is_between", [True, False])
def test_an_answer_that_is_asked_for_again_can_be_cancelled(
    checked: Served, monkeypatch: pytest.MonkeyPatch, *, is_between: bool
) -> None:
    """Between the two as well, where none of them runs."""
    url, said = checked.app.url, []

    def cancel() -> None:
        answer = httpx.post(f"{url}/v1/cancel/to-be-cancelled", timeout=10)
        said.append(answer.status_code)

    def checking(form: OutputFormat, text: str) -> AnswerCheck | None:
        if is_between:
            cancel()
        return check(form, text)

    def written(_: Prompt) -> str:
        if len(checked.switch.prompts) == 2 and not is_between:
            cancel()
        return "no"

    monkeypatch.setattr(checked_answer, "check", checking)
    checked.switch.prompts.clear()
    checked.switch.script = written
    ids = {"X-Request-ID": "to-be-cancelled"}
    answer = checked.ask(SIDES, headers=ids)
    assert said
    assert answer.status_code == 499, answer.text


@pytest.mark.parametrize("odd", [r"^\p{L}+$", "^(?<y>a)b$"])
def test_what_cannot_be_checked_is_sent_as_it_is(held: Served, odd: str) -> None:
    """The library knows such a pattern, and Python's does not."""
    inner = {"e": {"type": "string", "pattern": odd}, "l": SETS["properties"]["lamps"]}
    schema = {"type": "object", "properties": inner, "required": ["e", "l"]}
    held.says('{"e":"ab","l":[1,2]}')
    answer = held.ask(schema, is_strict=False)
    assert text_of(answer) == '{"e":"ab","l":[1,2]}'
    assert "response_format" in answer.headers[IGNORED]
    assert len(held.switch.prompts) == 1


def test_a_busy_machine_is_not_the_answers_fault(
    checked: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(script: Path, given: bytes) -> bytes | None:
        raise ChildBusy("others are run just now")

    checked.says('{"lit": true}', '{"lit": true}')
    assert text_of(checked.ask(SIDES))
    checked.says('{"lit": true}', '```\n{"lit": true}\n```')
    monkeypatch.setattr(answer_check, "run_limited", busy)
    answer = checked.ask(SIDES)
    assert answer.status_code == 503
    assert answer.headers["Retry-After"]
    assert "```" in text_of(checked.ask(SIDES, is_strict=False))


def test_text_before_a_call_is_sent(checked: Served) -> None:
    def calls(prompt: Prompt) -> str:
        return render(Answer(text="I look.", calls=(Call("look", {}),)), prompt)

    checked.switch.script = calls
    function = {"name": "look", "parameters": {"type": "object"}}
    answer = checked.ask(SIDES, tools=[{"type": "function", "function": function}])
    assert text_of(answer) == "I look."
    assert answer.json()["choices"][0]["finish_reason"] == "tool_calls"


def test_of_several_answers_none_is_asked_for_again(checked: Served) -> None:
    checked.says("no", '{"lit": true}')
    answer = checked.ask(SIDES, n=2, is_strict=False)
    texts = [choice["message"]["content"] for choice in answer.json()["choices"]]
    assert sorted(texts) == ["no", '{"lit": true}'] or texts == ["no", '{"lit": true}']
    assert len(checked.switch.prompts) == 2


def test_an_answer_that_a_stop_string_cut_is_sent_as_it_is(checked: Served) -> None:
    checked.says('{"lit": true, "num": 1}')
    answer = checked.ask(SIDES, stop=["num"])
    assert text_of(answer) == '{"lit": true, "'


def test_the_other_formats_say_it_too(checked: Served) -> None:
    checked.says("no", "no")
    body = {
        "model": "local",
        "max_tokens": 64,
        "messages": TALK,
        "output_config": {"format": {"type": "json_schema", "schema": SIDES}},
    }
    answer = httpx.post(f"{checked.app.url}/v1/messages", json=body, timeout=120)
    assert answer.status_code == 422
    assert answer.json()["type"] == "error"
    checked.says("no", '{"lit": true}')
    form = {"type": "json_schema", "name": "x", "schema": SIDES, "strict": True}
    body = {"model": "local", "input": "Lamps?", "text": {"format": form}}
    answer = httpx.post(f"{checked.app.url}/v1/responses", json=body, timeout=120)
    assert answer.json()["output"][-1]["content"][0]["text"] == '{"lit": true}'


@pytest.mark.parametrize("text", ["", "no", "NaN", "{", "{'a': 1}", "[[[[", "nan {"])
def test_text_without_json_is_found_to_be_that(text: str) -> None:
    assert found({}, text) == {"fault": "there is no JSON in it"}


def test_the_name_of_a_member_is_not_made_a_value() -> None:
    schema = {"propertyNames": {"enum": [1, 2]}}
    assert found(schema, '{"1": "words"}')["keyword"] == "enum"


@pytest.mark.parametrize(
    "text",
    [
        "Relevant are [2] and [5].",
        "[]\nCorrected: [7]",
        "```\n[1, 2]\n```\nNo:\n```\n[1]\n```",
        '[{"id": 1}]\nNone fits:\n[]',
        "[true] or [1]",
    ],
)
def test_of_two_lists_none_is_the_answer(text: str) -> None:
    assert found({"type": "array"}, text) == {"fault": "there is no JSON in it"}
    assert found({}, "As [asked]: [1]") == {"text": "[1]"}


def test_a_value_that_may_be_one_of_two_is_made_what_it_spells() -> None:
    optional = {"properties": {"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}}
    assert found(optional, '{"n": "5"}') == {"text": '{"n": 5}'}
    assert found(optional, '{"n": "null"}') == {"text": '{"n": null}'}
    assert found(optional, '{"n": "x"}')["path"] == "$.n"


def test_json_of_texts_is_left_where_nothing_else_was_asked() -> None:
    text = json.dumps({"a": "5"})
    assert found({"properties": {"a": {"type": "string"}}}, text) == {"text": text}
