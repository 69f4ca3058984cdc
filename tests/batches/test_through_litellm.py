"""Batches through LiteLLM: it sends them to a deployment that it takes for OpenAI's."""

from pathlib import Path

import openai
import pytest

from litellm_mlx.body_types import rules_for, wrong_field
from testkit.proxy import running_proxy
from tests.batches.conftest import CHAT, Batches, chat_line, ended, read, written

_NAME, _KEY = "local-batches", "sk-night"


def test_a_batch_goes_through_litellm(batches: Batches, tmp_path: Path) -> None:
    deployment = {
        "model_name": _NAME,
        "litellm_params": {
            "model": "openai/local",
            "api_base": f"{batches.app.url}/v1",
            "api_key": "any",
        },
    }
    own = {
        "model_list": [deployment],
        "general_settings": {
            "master_key": _KEY
        },  # without one LiteLLM shuts the routes
    }
    with running_proxy(batches.app.url, tmp_path, own=own) as proxy:
        client = proxy.openai.with_options(api_key=_KEY)
        lines = [chat_line(f"line-{n}", f"Say {n}.") for n in range(5)]
        file = client.files.create(
            file=("night.jsonl", written(lines)),
            purpose="batch",
            extra_body={"model": _NAME},
        )
        for name in ("api_base", "base_url"):
            with pytest.raises(openai.APIStatusError, match=name):
                client.batches.create(
                    input_file_id=file.id,
                    endpoint=CHAT,
                    completion_window="24h",
                    extra_body={name: "http://127.0.0.1:1/v1"},
                )
        batch = client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        done = ended(client, batch.id)
        assert done.status == "completed"
        assert done.request_counts.completed == 5
        found = read(client.files.content(done.output_file_id).read())
    assert found.keys() == {line["custom_id"] for line in lines}
    assert {one["response"]["status_code"] for one in found.values()} == {200}


def test_no_client_says_where_litellm_sends_a_batch() -> None:
    rules = rules_for("/v1/batches", is_known=True)
    asked = {"input_file_id": "file-1", "endpoint": CHAT, "completion_window": "24h"}
    assert wrong_field(asked, rules) is None
    for name in ("custom_llm_provider", "organization", "deployment_id"):
        wrong = wrong_field({**asked, name: "http://elsewhere"}, rules)
        assert wrong is not None
        assert wrong.param == name
