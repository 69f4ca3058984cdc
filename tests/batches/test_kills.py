"""kill -9 at random moments: each request of a batch is answered exactly once."""

import functools
import os
import random
import signal
import time
from pathlib import Path

import openai
import pytest

from testkit.process import sidecar_process
from tests.batches.conftest import begun, chat_line, ended, read, waited, written


def _killed(model: Path, tmp_path: Path, num_lines: int, num_kills: int) -> None:
    settings = {
        "MODEL_PATH": str(model),
        "MODEL_DIR": "none",
        "MLX_CACHE_HOME": str(tmp_path / "home"),
    }
    lines = [chat_line(f"line-{n}", f"Say {n}.") for n in range(num_lines)]
    batch_id, seed, counts = "", random.randrange(1 << 30), [0]
    chance = random.Random(seed)
    for _ in range(num_kills):
        with sidecar_process(tmp_path, settings) as server:
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="mine")
            if not batch_id:
                batch_id = begun(client, written(lines)).id
            wanted = counts[-1] + chance.randint(1, num_lines // (num_kills + 2))
            batch = waited(
                functools.partial(client.batches.retrieve, batch_id),
                lambda now, wanted=wanted: now.request_counts.completed >= wanted,
            )
            time.sleep(chance.uniform(0.0, 0.05))
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
            counts.append(batch.request_counts.completed)
    print(f"seed {seed}, answered before each kill: {counts[1:]}")
    assert counts[-1] < num_lines
    with sidecar_process(tmp_path, settings) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="mine")
        done = ended(client, batch_id, 1200)
        assert done.status == "completed"
        assert done.request_counts.completed == num_lines
        found = read(client.files.content(done.output_file_id).read())
    assert found.keys() == {line["custom_id"] for line in lines}
    said = {one["response"]["status_code"] for one in found.values()}
    assert said == {200}


def test_a_batch_goes_on_after_kills(model: Path, tmp_path: Path) -> None:
    _killed(model, tmp_path, 60, 2)


@pytest.mark.slow
def test_two_thousand_requests_and_ten_kills(model: Path, tmp_path: Path) -> None:
    _killed(model, tmp_path, 2000, 10)
