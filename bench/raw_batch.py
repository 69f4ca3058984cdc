"""
mlx-lm's BatchGenerator in a process of its own: the floor of every batch.

As a module it is that process: `python -m bench.raw_batch MODEL` reads one JSON request
a line and answers each with one JSON line. `RawBatch` is the other end.
"""

import itertools
import sys
import time
from typing import Any

from bench.piped_process import PipedProcess, serve
from bench.prompts import random_ids


class RawBatch(PipedProcess):
    """The parent's end of the process; it decodes one batch at a time."""

    def steps(self, num_rows: int, num_prompt: int, num_tokens: int) -> list[float]:
        """Seconds of each step in which all rows of new prompts decode."""
        asked = {"rows": num_rows, "prompt": num_prompt, "tokens": num_tokens}
        found: list[float] = self.ask(asked)["steps"]
        return found


def main(folder: str) -> None:
    """Serve stdin until it ends."""
    from mlx_lm import load

    model, _ = load(folder)
    serve(lambda asked: {"steps": _steps(model, **asked)})


def _steps(model: Any, rows: int, prompt: int, tokens: int) -> list[float]:
    from mlx_lm.generate import BatchGenerator

    prompts = [random_ids(prompt) for _ in range(rows)]
    batch = BatchGenerator(
        model, max_tokens=tokens, completion_batch_size=rows, prefill_batch_size=8
    )
    ends: list[float] = []
    batch.insert(prompts, [tokens] * rows)
    while True:
        read, said = batch.next()
        if not read and not said:
            break
        if len(said) == rows:
            ends.append(time.perf_counter())
    batch.close()
    return [after - before for before, after in itertools.pairwise(ends)]


if __name__ == "__main__":
    main(sys.argv[1])
