"""Only what a deployment of this proxy stored can be asked for by its id."""

import base64

import httpx
import pytest

from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.fake_sidecar import FakeSidecar
from tests.litellm_mlx.proxy_client import RESPONSES
from tests.litellm_mlx.sidecar_answers import Script
from tests.litellm_mlx.test_abandoned import WHOLE

UNKNOWN = "no stored response has this id"


def encoded(provider: str, model_id: str) -> str:
    told = f"litellm:custom_llm_provider:{provider};model_id:{model_id};response_id:r"
    return f"resp_{base64.b64encode(told.encode()).decode()}"


@pytest.fixture(scope="module")
def own_id(proxy: Proxy, sidecar: FakeSidecar) -> str:
    """Of a response that LiteLLM has answered with."""
    script = Script()
    script.body = WHOLE[RESPONSES]
    sidecar.on("stored", script)
    body = {"model": "native/stored", "input": "hi"}
    answer = proxy.http.post(RESPONSES, json=body)
    assert answer.status_code == 200
    return str(answer.json()["id"])


def deployment(own_id: str) -> str:
    told = base64.b64decode(own_id.removeprefix("resp_")).decode()
    return told.partition("model_id:")[2].partition(";")[0]


def ask(proxy: Proxy, how: str, response_id: str) -> httpx.Response:
    method, _, end = how.partition(" ")
    return proxy.http.request(method, f"/v1/responses/{response_id}{end}")


@pytest.mark.parametrize("how", ["GET", "DELETE", "GET /input_items", "POST /cancel"])
@pytest.mark.parametrize("provider", ["openai", "azure", "xai", "gemini", ""])
def test_an_id_with_another_providers_name_goes_nowhere(
    proxy: Proxy, own_id: str, provider: str, how: str
) -> None:
    """LiteLLM would ask that provider, on the key that the user has for it."""
    answer = ask(proxy, how, encoded(provider, deployment(own_id)))
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == UNKNOWN


@pytest.mark.parametrize("response_id", ["resp_123", "x", "resp_%00"])
def test_nor_does_one_that_nobody_here_gave(proxy: Proxy, response_id: str) -> None:
    """Without a provider's name it would be OpenAI's."""
    answer = ask(proxy, "GET", response_id)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"] == UNKNOWN


def test_a_deployment_that_is_not_there_has_stored_nothing(proxy: Proxy) -> None:
    assert ask(proxy, "GET", encoded("mlx", "no-such")).status_code == 404


def test_its_own_ids_are_litellms_to_answer(proxy: Proxy, own_id: str) -> None:
    """Which it does not do for custom providers, and says so."""
    answer = ask(proxy, "GET", own_id)
    assert answer.status_code == 501
