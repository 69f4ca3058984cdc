"""GET /v1/models/NAME: an entry of the list, and what its files say of it."""

from urllib.parse import quote

import httpx
import openai
import pytest

from sidecar.app import App


def test_each_name_of_a_model_finds_it(app: App) -> None:
    (entry,) = httpx.get(f"{app.url}/v1/models", timeout=30).json()["data"]
    for name in (entry["id"], *entry["aliases"]):
        found = httpx.get(f"{app.url}/v1/models/{quote(name)}", timeout=30).json()
        details = found.pop("details")
        assert found == entry
        assert details["layers"] == 8
        assert details["vocab_size"] == 3072
        assert details["quant_bits"] is None
        assert details["num_bytes"] > 1_000_000


def test_openais_client_reads_one(app: App) -> None:
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="x") as client:
        assert client.models.retrieve("local").object == "model"
        with pytest.raises(openai.NotFoundError):
            client.models.retrieve("nobody")


def test_other_methods_are_refused(app: App) -> None:
    assert httpx.delete(f"{app.url}/v1/models/local", timeout=30).status_code == 405
