"""
A model on stdin and stdout: one JSON object a line, in and out.

    printf '{"cmd":"load"}\n{"cmd":"generate","prompt":"Once"}\n' | mlx-sidecar jsonl

Commands are done one at a time, in their order; `cancel` is heard at once. Nothing but
answers is written to stdout.
"""

import argparse
import contextlib
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import IO, TYPE_CHECKING, Any

from sidecar.config.sources import ConfigError
from sidecar.core.errors import SidecarError
from sidecar.engine.loading.checkpoint_files import memory_limit
from sidecar.engine.loading.model_place import early_fault
from sidecar.infra.logs import setup_logging

if TYPE_CHECKING:
    from sidecar.library import Model, Piece

Json = dict[str, Any]

_MAX_BYTES = 64 << 20  # of a line
_AGAIN_S = 0.01
_GREEDY: Json = {
    "max_tokens": 256, "temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0,
    "repetition_penalty": 1,
}  # fmt: skip


def main(argv: list[str]) -> int:
    """Exit codes: 0 quit or end of input, 2 bad usage."""
    _parser().parse_args(argv)
    setup_logging("WARNING", os.environ)  # noqa: TID251 - FORCE_COLOR and such
    # Whatever a library prints must not stand among the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        Session(answers).run(sys.stdin.buffer)
    except BrokenPipeError:  # nobody reads any more
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(0)  # the thread that reads stdin holds what an ordinary end waits for
    return 0


class BadCommand(Exception):
    """A command that cannot be done; the message says why."""


class Session:
    """
    One session.

    Args:
        answers: where lines are written, each at once.
    """

    def __init__(self, answers: IO[str]) -> None:
        self._answers = answers
        self._lock = threading.Lock()
        self._model: Model | None = None
        self._commands: queue.SimpleQueue[Json | None] = queue.SimpleQueue()
        self._num_heard = 0  # commands that were heard and are not done
        self._is_doing = False
        self._is_cancelled = False
        self._acts: dict[str, Callable[[Json], Json | None]] = {
            "load": self._load,
            "generate": self._generate,
            "chat": self._chat,
            "info": self._info,
            "classify": self._classify,
            "batch_generate": self._batch_generate,
        }

    def run(self, lines: Iterable[bytes]) -> None:
        """
        Do what the lines say, until one says `quit` or there are no more.

        Raises:
            BrokenPipeError: nobody reads the answers; the model is closed.
        """
        reader = threading.Thread(
            target=self._read, args=[lines], name="jsonl", daemon=True
        )
        reader.start()
        try:
            while (command := self._commands.get()) is not None:
                self._do(command)
        finally:
            if self._model is not None:
                self._model.close()

    def _read(self, lines: Iterable[bytes]) -> None:
        try:
            for line in lines:
                if line.strip() and self._take(line):
                    break
        except BrokenPipeError:
            pass  # nobody reads the answers
        except (OSError, ValueError) as error:  # a closed pipe
            with contextlib.suppress(OSError):
                self._write(None, {"error": f"the input cannot be read: {error}"})
        self._commands.put(None)

    def _take(self, line: bytes) -> bool:
        """Hear a line; whether it is the last."""
        if len(line) > _MAX_BYTES:
            self._write(None, {"error": f"a line has {_MAX_BYTES} bytes at most"})
            return False
        try:
            command = json.loads(line)
        except (ValueError, RecursionError):  # no UTF-8 is a ValueError
            self._write(None, {"error": "the line is no JSON"})
            return False
        if not isinstance(command, dict):
            self._write(None, {"error": "the line is no JSON object"})
            return False
        if command.get("cmd") == "cancel":
            self._cancel()
            return False
        if command.get("cmd") == "quit":
            return True
        with self._lock:
            self._num_heard += 1
        self._commands.put(command)
        return False

    def _cancel(self) -> None:
        """
        End what runs, or what is to run next; nothing is said where nothing does.

        It may come before its call has begun: it is told again until that has ended.
        """
        with self._lock:
            if not self._num_heard:
                return
            self._is_cancelled = True
        threading.Thread(target=self._end_call, name="cancel", daemon=True).start()

    def _end_call(self) -> None:
        while self._is_cancelled:
            if (model := self._model) is not None:
                model.cancel()
            time.sleep(_AGAIN_S)

    def _do(self, command: Json) -> None:
        name = command.get("cmd")
        fields = {k: v for k, v in command.items() if k not in ("cmd", "id")}
        self._is_doing = True
        try:
            act = self._acts.get(name) if isinstance(name, str) else None
            if act is None:
                known = ", ".join([*self._acts, "cancel", "quit"])
                raise BadCommand(f"cmd must be one of {known}")
            answer = act({**fields, "id": command.get("id")})
        except (SidecarError, BadCommand, ConfigError) as error:
            answer = {"error": str(error)}
            if self._is_cancelled:
                answer = {"done": True, "cancelled": True}
        except BrokenPipeError:
            raise
        except Exception as error:  # noqa: BLE001 - the process lives on
            answer = {"error": f"internal error: {error!r}"}
        finally:
            self._end_command()
        if answer is not None:
            self._write(command.get("id"), answer)

    def _end_command(self) -> None:
        """A cancel from now on is the next command's; before its last line is sent."""
        with self._lock:
            if self._is_doing:
                self._is_doing = self._is_cancelled = False
                self._num_heard -= 1

    def _loaded(self) -> "Model":
        if self._model is None:
            raise BadCommand("no model is loaded: load one first")
        return self._model

    def _load(self, fields: Json) -> Json:
        from sidecar.library import open_model, settings_of

        path, settings = fields.get("path"), fields.get("settings") or {}
        _require_known(fields, ("path", "settings"))
        if path is not None and not isinstance(path, str):
            raise BadCommand("path must be a string")
        if not isinstance(settings, dict) or not all(
            isinstance(value, str) for value in settings.values()
        ):
            raise BadCommand("settings must be an object of strings")
        settings_of(path, settings)  # a wrong one costs nobody his model
        if path is not None and (fault := early_fault(path, memory_limit(None, None))):
            raise BadCommand(fault)
        if self._model is not None:
            self._model.close()
            self._model = None
        self._model = open_model(path, settings)
        info = self._model.info()
        return {
            "ok": True,
            "model_type": info["model_type"],
            "vocab_size": info["vocab_size"],
        }

    def _info(self, fields: Json) -> Json:
        _require_known(fields, ())
        return self._loaded().info()

    def _generate(self, fields: Json) -> None:
        model, prompt = self._loaded(), fields.pop("prompt", None)
        if not isinstance(prompt, str | list):
            raise BadCommand("prompt must be a string or token ids")
        _refuse_logprobs(fields)
        id_ = fields.pop("id")
        self._say(id_, model.generate(prompt, **_GREEDY | fields))

    def _chat(self, fields: Json) -> None:
        model, messages = self._loaded(), fields.pop("messages", None)
        if not isinstance(messages, list):
            raise BadCommand("messages must be a list")
        _refuse_logprobs(fields)
        id_ = fields.pop("id")
        self._say(id_, model.chat(messages, **_GREEDY | fields))

    def _say(self, id_: Any, pieces: "Generator[Piece, None, None]") -> None:
        """A line for each token, then one that says how it ended."""
        num_tokens, reason = 0, None
        with contextlib.closing(pieces):
            for piece in pieces:
                num_tokens += len(piece.tokens)
                reason = piece.finish_reason or reason
                for line in _lines_of(piece):
                    self._write(id_, line)
        self._end_command()
        model = self._loaded()
        if reason is None:
            self._write(id_, {"done": True, "cancelled": True})
            return
        metrics = model.metrics() or {}
        done = {
            "done": True,
            "tokens_generated": metrics.get("generated_tokens", num_tokens),
            "finish_reason": reason,
            "metrics": metrics,
        }
        self._write(id_, done)

    def _classify(self, fields: Json) -> Json:
        prompts, labels = fields.pop("prompts", None), fields.pop("labels", [])
        del fields["id"]
        if not isinstance(prompts, list | None) or not isinstance(labels, list):
            raise BadCommand("prompts and labels must be lists")
        return {"results": self._loaded().classify(prompts, labels, **fields)}

    def _batch_generate(self, fields: Json) -> Json:
        prompts = fields.pop("prompts", None)
        del fields["id"]
        if prompts is not None and not isinstance(prompts, list):
            raise BadCommand("prompts must be a list")
        found = self._loaded().batch_generate(prompts, **_GREEDY | fields)
        return {"results": found}

    def _write(self, id_: Any, answer: Json) -> None:
        named = answer if id_ is None else {"id": id_, **answer}
        line = json.dumps(named, ensure_ascii=False, default=str)
        # A lone surrogate is no UTF-8.
        safe = line.encode("utf-8", "replace").decode("utf-8")
        with self._lock:
            self._answers.write(safe + "\n")
            self._answers.flush()


def _lines_of(piece: "Piece") -> list[Json]:
    """Text belongs to the last token that made it."""
    if piece.kind == "tool_call" and piece.call is not None:
        call = {"name": piece.call.name, "arguments": piece.call.arguments}
        return [{"tool_call": {"id": piece.call.id, **call}}]
    if piece.kind == "end":
        return []
    kind = {"reasoning": True} if piece.kind == "reasoning" else {}
    ids: list[int | None] = [token.token_id for token in piece.tokens] or [None]
    texts = [*[""] * (len(ids) - 1), piece.text]
    return [
        {"token": text, "token_id": id_, **kind}
        for text, id_ in zip(texts, ids, strict=True)
    ]


def _refuse_logprobs(fields: Json) -> None:
    """A line has a token and its id, nothing else."""
    for name in ("logprobs", "top_logprobs"):
        if (value := fields.get(name)) is not None and value is not False:
            raise BadCommand(f"{name} must be left out here")


def _require_known(fields: Json, known: tuple[str, ...]) -> None:
    for name in fields:
        if name not in (*known, "id"):
            named = f"one of {', '.join(known)}" if known else "a field of it"
            raise BadCommand(f"{name} is not {named}")


def _parser() -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="mlx-sidecar jsonl",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
