"""Both ends of a process that answers each line of JSON with one of its own."""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The child's end: answer each request until standard input ends; `null` by {}."""
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(answer(request) if request else {}), flush=True)


class PipedProcess:
    """The parent's end. The child is ready once it has answered `null`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.ask(None)  # returns once the model is loaded

    def ask(self, request: dict[str, Any] | None) -> dict[str, Any]:
        """
        Its answer.

        Raises:
            ChildProcessError: it has ended.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise ValueError("the process needs pipes for stdin and stdout")
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise ChildProcessError(f"{self._process.args!r} ended")
        answer: dict[str, Any] = json.loads(line)
        return answer
