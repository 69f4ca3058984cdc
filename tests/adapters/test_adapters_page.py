"""docs/adapters.md: its request is one that is taken, its table is what is read."""

import json
import re
from pathlib import Path

from sidecar.core.native import LoraJob
from sidecar.dialects.native import parse_train

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text()


def test_the_request_is_taken() -> None:
    (body,) = re.findall(r"-d '(\{.*?\})'", PAGE, re.DOTALL)
    request = parse_train(json.loads(body))
    assert (request.name, len(request.rows), request.job.iters) == ("stone", 4, 100)


def test_the_table_names_all_that_is_read() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    fields = set(LoraJob.__dataclass_fields__)
    assert named == {"name", "data", "model", *fields}


def test_defaults_are_those_of_the_table() -> None:
    job = LoraJob()
    assert (job.rank, job.alpha, job.num_layers, job.iters) == (8, 160.0, 16, 100)
    assert (job.learning_rate, job.weight_decay) == (1e-5, 0.01)
    assert (job.batch_size, job.grad_accumulation, job.max_seq_length) == (4, 1, 2048)
