"""How often a client may ask: the buckets on a test's clock, the rest at work."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.config.settings import ServerConfig
from sidecar.core.errors import RateLimitExceeded
from sidecar.service.rate_limits import RateLimits
from testkit.servers import running_sidecar

Json = dict[str, Any]


class Clock:
    """Seconds, as the test has them pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def limits_of(clock: Clock, requests: int = 0, tokens: int = 0) -> RateLimits:
    config = replace(
        ServerConfig(), requests_per_minute=requests, tokens_per_minute=tokens
    )
    return RateLimits(config, clock)


def refused(limits: RateLimits, client: str = "one") -> int:
    """The seconds after which a client that is refused may ask again."""
    with pytest.raises(RateLimitExceeded) as error:
        limits.begin(client)
    assert error.value.retry_after_s is not None
    return error.value.retry_after_s


def test_a_minutes_requests_are_taken_and_then_one_as_soon_as_it_is_due() -> None:
    """A refused one does not count; the time that it is told is long enough."""
    limits = limits_of(clock := Clock(), requests=6)
    for _ in range(6):
        limits.begin("one")
    assert [refused(limits) for _ in range(3)] == [10, 10, 10]
    clock.now += 9.0
    assert refused(limits) == 1
    clock.now += 1.0
    limits.begin("one")
    assert refused(limits) == 10


def test_clients_are_counted_apart_and_nobody_is_not() -> None:
    """An hour of silence is worth a minute, no more."""
    limits = limits_of(clock := Clock(), requests=2)
    limits.begin("one")
    limits.begin("one")
    limits.begin("two")
    for _ in range(9):
        limits.begin("")
    refused(limits)
    clock.now += 3600
    limits.begin("one")
    limits.begin("one")
    assert refused(limits) == 30


def test_tokens_are_owed_when_an_answer_has_cost_more_than_there_were() -> None:
    """Then nothing is taken until they are paid back."""
    limits = limits_of(clock := Clock(), tokens=600)
    limits.begin("one")
    limits.computed("one", 900)
    assert refused(limits) == 30
    limits.begin("two")
    clock.now += 29.0
    assert refused(limits) == 1
    clock.now += 1.1
    limits.begin("one")


def test_of_two_limits_the_longer_wait_is_told() -> None:
    """Else it would be refused once more when the shorter one is over."""
    limits = limits_of(clock := Clock(), requests=1, tokens=600)
    limits.begin("one")
    limits.computed("one", 700)
    assert refused(limits) == 60
    clock.now += 60
    limits.begin("one")


@pytest.mark.parametrize(
    ("limit", "param"), [({"requests": 1}, "RPM"), ({"tokens": 1}, "TPM")]
)
def test_a_refusal_names_the_limit(limit: dict[str, int], param: str) -> None:
    """And how much it is."""
    limits = limits_of(Clock(), **limit)
    limits.begin("one")
    limits.computed("one", 1)
    with pytest.raises(
        RateLimitExceeded, match=rf"at most 1 \w+ a minute .RATE_LIMIT_{param}"
    ):
        limits.begin("one")


@pytest.fixture(scope="module")
def app() -> Iterator[App]:
    """A server whose limits each test sets while it runs."""
    with running_sidecar() as running:
        yield running


def set_limits(app: App, **limits: int) -> None:
    """Have others act at once: each client begins with a full minute."""
    for wanted in ({"RPM": None, "TPM": None}, limits):
        changes = {f"RATE_LIMIT_{name}": value for name, value in wanted.items()}
        url, page = f"{app.url}/admin/settings", {"X-Admin": "1"}
        httpx.post(url, json=changes, headers=page).raise_for_status()


def ask(app: App, route: str = "chat/completions", **more: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "What is the capital of France? " * 9}]
    body = {"model": "local", "messages": messages, "max_tokens": 1, **more}
    return httpx.post(f"{app.url}/v1/{route}", json=body, timeout=60)


ROUTES: dict[str, Json] = {
    "chat/completions": {},
    "messages": {},
    "responses": {"input": "hi", "max_output_tokens": 1, "store": False},
    "completions": {"prompt": "hi", "max_tokens": 1},
    "embeddings": {"model": "local", "input": "hi"},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
def test_each_route_refuses_in_its_own_form(
    app: App, route: str, *, stream: bool
) -> None:
    """429 before the first byte, with the seconds; a look at the server is free."""
    set_limits(app, RPM=1)
    ask(app, "chat/completions")
    asked = ROUTES[route] or {"messages": [{"role": "user", "content": "hi"}]}
    body = {"model": "local", "max_tokens": 1, "stream": stream, **asked}
    answer = httpx.post(f"{app.url}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 429, answer.text
    assert 1 <= int(answer.headers["Retry-After"]) <= 60
    error = answer.json().get("error", answer.json())
    assert "RATE_LIMIT_RPM" in str(error)
    if route == "messages":
        assert error["type"] == "rate_limit_error"
    for path in ("health", "metrics", "v1/models", "admin/state"):
        assert httpx.get(f"{app.url}/{path}").status_code == 200


def test_a_key_that_litellm_knows_has_limits_of_its_own(app: App) -> None:
    """One that a client has made up has those of its address."""
    set_limits(app, RPM=1)
    known = {"x_mlx": {"key": "one", "key_checked": True}}
    assert ask(app, **known).status_code == 200
    assert ask(app, **known).status_code == 429
    other = {"x_mlx": {"key": "two", "key_checked": True}}
    assert ask(app, **other).status_code == 200
    made_up = [{"x_mlx": {"key": name}} for name in ("three", "four")]
    assert [ask(app, **key).status_code for key in made_up] == [200, 429]


def test_what_is_reused_costs_nothing(app: App) -> None:
    """Of a prompt that comes again only the last tokens are computed."""
    set_limits(app, TPM=80)
    first = ask(app, x_mlx={"key": "cold", "key_checked": True})
    assert first.json()["usage"]["prompt_tokens"] > 80
    assert ask(app, x_mlx={"key": "cold", "key_checked": True}).status_code == 429
    set_limits(app, TPM=80)  # anew, and now the prompt is known
    again = [ask(app, x_mlx={"key": "cold", "key_checked": True}) for _ in range(3)]
    assert [answer.status_code for answer in again] == [200] * 3


def test_nothing_is_limited_unless_it_is_asked_for(app: App) -> None:
    """0 is the default, and takes a limit back."""
    set_limits(app, RPM=1)
    ask(app)
    assert ask(app).status_code == 429
    set_limits(app, RPM=0)
    assert [ask(app).status_code for _ in range(4)] == [200] * 4
