"""The spellings by which clients say whether to think."""

from typing import Any

import pytest

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Thinking
from sidecar.dialects.generation_fields import read_thinking

ON = [
    "true", "1", "yes", "on", "enabled", "enable", "auto", "default", "adaptive",
    "minimal", "low", "medium", "high", "xhigh", "max",
]  # fmt: skip
OFF = ["false", "0", "no", "off", "none", "disable", "disabled"]
SOURCES = (
    "enable_thinking",
    "chat_template_kwargs.enable_thinking",
    "thinking",
    "reasoning_effort",
    "reasoning",
)
ALL_SOURCES = [
    prefix + source for prefix in ("", "metadata.", "extra_body.") for source in SOURCES
]
EFFORT = "reasoning_effort"  # refused where it says nothing that is known
NO_VALUES: list[Any] = [None, 2, -1, 0.5, "", "maybe", "2", {}, [], ["true"]]


def put(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    place = body
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
    return body


def enabled(value: Any, source: str = "enable_thinking") -> bool | None:
    return read_thinking(put({}, source, value)).enabled


@pytest.mark.parametrize("value", [True, 1, 1.0, *ON])
def test_values_that_mean_on(value: object) -> None:
    """Every word for on, in any case and with space around it."""
    assert enabled(value) is True
    if isinstance(value, str):
        assert enabled(f"  {value.upper()}\n") is True


@pytest.mark.parametrize("value", [False, 0, 0.0, *OFF])
def test_values_that_mean_off(value: object) -> None:
    """Every word for off, in any case and with space around it."""
    assert enabled(value) is False
    if isinstance(value, str):
        assert enabled(f"  {value.upper()}\n") is False


@pytest.mark.parametrize("value", NO_VALUES)
@pytest.mark.parametrize("source", [name for name in ALL_SOURCES if name != EFFORT])
def test_values_that_decide_nothing(source: str, value: object) -> None:
    """Null, other numbers, other strings, empty objects: the next source is asked."""
    assert enabled(value, source) is None
    if source != ALL_SOURCES[-1]:
        body = put(put({}, source, value), ALL_SOURCES[-1], False)
        assert read_thinking(body).enabled is False


@pytest.mark.parametrize("first", range(len(ALL_SOURCES) - 1))
def test_the_first_source_wins(first: int) -> None:
    """Each source beats the next in the order of the specification."""
    winner, loser = ALL_SOURCES[first], ALL_SOURCES[first + 1]
    body = put(put({}, loser, False), winner, True)
    thinking = read_thinking(body)
    assert (thinking.enabled, thinking.source) == (True, winner)


@pytest.mark.parametrize("source", ["thinking", "reasoning"])
def test_keys_of_an_object_in_order(source: str) -> None:
    """enabled, effort, level, type; the first that decides."""
    keys = ["enabled", "effort", "level", "type"]
    for place, key in enumerate(keys):
        value = {key: "off", **dict.fromkeys(keys[place + 1 :], "on")}
        value |= dict.fromkeys(keys[:place], "")
        thinking = read_thinking({source: value})
        assert (thinking.enabled, thinking.source) == (False, f"{source}.{key}")


def test_a_budget_of_zero_means_off() -> None:
    """budget_tokens 0 beats a type; any other budget decides nothing."""
    assert enabled({"type": "enabled", "budget_tokens": 0}, "thinking") is False
    assert enabled({"type": "enabled", "budget_tokens": 1024}, "thinking") is True
    assert enabled({"budget_tokens": 1024}, "thinking") is None


def test_source_and_raw_value_are_kept_for_the_log() -> None:
    """Who decided, and the value as it came."""
    body = {"extra_body": {"reasoning": {"effort": " High "}}}
    assert read_thinking(body) == Thinking(
        True, "extra_body.reasoning.effort", " High ", None
    )


@pytest.mark.parametrize(
    ("body", "effort"),
    [
        ({"reasoning_effort": "LOW"}, "low"),
        ({"reasoning": {"effort": "xhigh"}}, "xhigh"),
        ({"thinking": {"effort": "max"}}, "max"),
        ({"reasoning_effort": "none"}, None),
        ({"reasoning_effort": "on"}, None),
        ({"reasoning_effort": {"effort": "high", "summary": "auto"}}, "high"),
        ({"output_config": {"effort": "Max"}}, "max"),
        ({"reasoning_effort": ""}, None),
        ({}, None),
    ],
)
def test_the_effort_word_is_kept(body: dict[str, Any], effort: str | None) -> None:
    """Templates that take an effort get the word; on and off are no efforts."""
    assert read_thinking(body).effort == effort


@pytest.mark.parametrize("effort", ["immense", 3, -1, 0.5, ["low"]])
@pytest.mark.parametrize(
    "field", [EFFORT, "reasoning.effort", "output_config.effort", "thinking.effort"]
)
def test_an_effort_that_nobody_knows_is_refused(field: str, effort: object) -> None:
    """By its own name; not read as if nothing was asked for."""
    with pytest.raises(BadRequest, match="minimal, low, medium") as refused:
        read_thinking(put({}, field, effort))
    assert refused.value.param == field


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": "text", "extra_body": 3, "chat_template_kwargs": []},
        {"thinking": {"type": {"deep": 1}}, "reasoning": {"enabled": [1]}},
    ],
)
def test_odd_shapes_decide_nothing(body: dict[str, Any]) -> None:
    """Fields of shapes nobody sends are passed over."""
    assert read_thinking(body) == Thinking()
