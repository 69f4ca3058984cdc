"""
Plain `mlx_lm.stream_generate` in a process of its own: the floor of every server.

As a module it is that process: `python -m bench.plain MODEL` reads one JSON request a
line and answers each with one JSON line. `PlainProcess` is the other end.
"""

import sys
import time
from typing import Any

from bench.clients import Answer
from bench.piped_process import PipedProcess, serve


class PlainProcess(PipedProcess):
    """The parent's end of the process; it answers one prompt at a time."""

    def complete(self, prompt: str, max_tokens: int) -> Answer:
        """Generate greedily; times are of the process itself, on its own clock."""
        return Answer(**self.ask({"prompt": prompt, "max_tokens": max_tokens}))


def main(folder: str) -> None:
    """Serve stdin until it ends."""
    from mlx_lm import load

    model, tokenizer = load(folder)
    serve(lambda request: _generate(model, tokenizer, **request))


def _generate(
    model: Any, tokenizer: Any, prompt: str, max_tokens: int
) -> dict[str, Any]:
    from mlx_lm import stream_generate

    text: list[str] = []
    times: list[float] = []
    response: Any = None
    started = time.perf_counter()
    for response in stream_generate(model, tokenizer, prompt, max_tokens=max_tokens):
        if response.text:
            text.append(response.text)
            times.append(time.perf_counter())
    times = times or [time.perf_counter()]  # tokens that make no character yet
    return {
        "started": started,
        "first": times[0],
        "last": times[-1],
        "text": "".join(text),
        "num_prompt": response.prompt_tokens,
        "num_cached": 0,
        "num_generated": response.generation_tokens,
    }


if __name__ == "__main__":
    main(sys.argv[1])
