"""
The production sidecar with the script in its sampler, and a record of each request.

`stack` puts a package named `sidecar` in front of the real one; its `__main__` comes
here. All else is the checkout's own: settings, pipeline, store, engine, server.
"""

import json
import os
import runpy
import threading
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import sidecar.app
from sidecar.engine.job import ChoiceEnded, Job, Prefilled
from sidecar.infra.session_log import SessionLog
from testkit.scripted import Forced, parse_prompt
from tests.clients.script import ClientScript


class _Rows:
    """Writes what happened, one JSON line each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def add(self, row: dict[str, Any]) -> None:
        text = json.dumps(row, ensure_ascii=False, default=str)
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def main() -> None:
    """Serve as `python -m sidecar` does."""
    run = Path(os.environ["CLIENTS_RUN"])
    tree = Path(os.environ["CLIENTS_TREE"])
    rows = _Rows(run / "requests.jsonl")
    _note_jobs(rows)
    real_build = sidecar.app.build
    processors = _scripted(run, tree, rows)

    def build(config: Any, **more: Any) -> Any:
        return real_build(config, **{**more, "extra_processors": processors})

    sidecar.app.build = build
    runpy.run_path(str(tree / "sidecar" / "__main__.py"), run_name="__main__")


def _scripted(run: Path, tree: Path, rows: _Rows) -> Any:
    folder = tree / "sidecar" / "builtin_model"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end_id = tokenizer.token_to_id("<|im_end|>")
    script = ClientScript(lambda: (run / "cwd").read_text())

    def processors(job: Job, _choice: int) -> list[Any]:
        prompt_ids = list(job.spec.model_ids)
        text = tokenizer.decode(prompt_ids, skip_special_tokens=False)
        said = script(parse_prompt(text))
        ids = tokenizer.encode(said, add_special_tokens=False).ids
        limit = job.spec.max_tokens
        rows.add(
            {
                "kind": "job", "job": job.number, "ids": prompt_ids, "said": said,
                "said_ids": ids[:limit], "cut": len(ids) >= limit,
            }
        )  # fmt: skip
        return [Forced([*ids, end_id])]

    return processors


def _note_jobs(rows: _Rows) -> None:
    """Have jobs and the session log tell `rows` what they do."""
    latest = threading.local()
    real_init, real_emit, real_write = Job.__init__, Job.emit, SessionLog.write
    cached: dict[int, int] = {}

    def init(self: Job, *args: Any, **kwargs: Any) -> None:
        real_init(self, *args, **kwargs)
        latest.job = self.number

    def emit(self: Job, event: Any) -> None:
        if isinstance(event, Prefilled):
            cached[self.number] = event.cached
        elif isinstance(event, ChoiceEnded):
            row = {"kind": "end", "job": self.number, "reason": event.reason}
            rows.add({**row, "cached": cached.pop(self.number, 0)})
        real_emit(self, event)

    def write(
        self: SessionLog, session: str, request_id: str, direction: Any, *more: Any
    ) -> None:
        row = {"kind": direction, "job": getattr(latest, "job", None)}
        if direction != "sampler":
            rows.add(
                {**row, "session": session, "request_id": request_id, "told": more}
            )
        real_write(self, session, request_id, direction, *more)

    Job.__init__ = init  # type: ignore[method-assign]
    Job.emit = emit  # type: ignore[method-assign]
    SessionLog.write = write  # type: ignore[method-assign,assignment]
