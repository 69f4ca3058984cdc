"""
How fast a running server reads prompts and writes answers, by the length of a prompt.

    mlx-sidecar bench [--model MODEL] [--lengths 1k,8k,32k] [--streams 4]

Of each length one prompt of random words is asked for the first time (cold), then gone
on with (warm), and then by several streams at once, each with a question of its own.
Rates are what a client sees over HTTP, in tokens a second. Nothing else should run.
"""

import argparse
import json
import random
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from sidecar.cli.server import (
    Json,
    Reply,
    Server,
    ServerError,
    add_server_flags,
    at_least,
    server_of,
)

_WORDS = (
    "river", "table", "seven", "garden", "window", "paper", "silver", "mountain",
    "letter", "summer", "yellow", "market", "bridge", "doctor", "forest", "number",
)  # fmt: skip
_GO_ON = "Count upwards from 1 in words, one a line, and do not stop."
_MAX_LEN = 1 << 20
_SHORTEST = 64  # tokens; the question and the template take about 30
_MIN_STEPS = 8  # tokens of an answer from which a rate is told
_COLUMNS = (
    f"{'PROMPT':>8} {'COLD':>10} {'PREFILL':>11} {'WARM':>10} {'REUSED':>8} "
    f"{'DECODE':>11}"
)


@dataclass(frozen=True, slots=True)
class Timed:
    """A reply, with the moments of its beginning and its end; seconds."""

    reply: Reply
    started: float
    ended: float

    @property
    def begun(self) -> float:
        """When the first piece of the answer came."""
        return self.started + self.reply.ttft_s


@dataclass(frozen=True, slots=True)
class Measured:
    """
    One length's figures; rates are tokens a second.

    Args:
        prompt_len: tokens. cold_s, warm_s: to the first piece of the answer.
        prefill_rate: of the cold prompt. reused: share of the warm prompt.
        decode_rate: of one stream; None: its answer was too short to tell.
        streams_rate: of all streams together.
    """

    prompt_len: int
    cold_s: float
    prefill_rate: float
    warm_s: float
    reused: float
    decode_rate: float | None
    streams_rate: float | None


def main(argv: list[str]) -> int:
    """Exit codes: 0 measured, 1 no answer or no such model, 2 bad usage."""
    options = _parser().parse_args(argv)
    server = server_of(options)
    try:
        found = []
        for measured in _measure_all(server, options):
            found.append(measured)
            if not options.json:
                _say(_row(measured))
    except ServerError as error:
        sys.stderr.write(f"mlx-sidecar bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        _say(json.dumps([asdict(measured) for measured in found]))
    return 0


def _measure_all(server: Server, options: argparse.Namespace) -> Iterator[Measured]:
    context = _context(server, options.model)
    most = context - 2 * options.max_tokens - _SHORTEST
    lengths = [length for length in options.lengths if length <= most]
    if not lengths:
        raise ServerError(
            f"the context of {options.model}, {context} tokens, is too short for each "
            "of --lengths with two answers of --max-tokens"
        )
    server.chat(_body(options, [_user("Hello.")]))  # it is loaded now
    if not options.json:
        _say(f"{server.url} model={options.model}; tokens/s over HTTP")
        _say(f"{_COLUMNS} {f'{options.streams} STREAMS':>11}")
    for length in sorted({*options.lengths} - {*lengths}):
        sys.stderr.write(f"{length:>8} is more than the model's context takes\n")
    for length in lengths:
        yield _measure(server, options, length)


def _measure(server: Server, options: argparse.Namespace, length: int) -> Measured:
    talk = [_text(server, options.model, length), _user(_GO_ON)]
    cold = _ask(server, _body(options, talk))
    talk += [cold.reply.message, _user("Go on.")]
    warm = _ask(server, _body(options, talk))
    apart = [[*talk[:1], _user(f"{n}. {_GO_ON}")] for n in range(options.streams)]
    bodies = [_body(options, each) for each in apart]
    try:
        with ThreadPoolExecutor(options.streams) as threads:
            streams = list(threads.map(lambda body: _ask(server, body), bodies))
        streams_rate = decode_rate(streams)
    except ServerError as error:  # what was measured before is told
        sys.stderr.write(f"mlx-sidecar bench: {error}\n")
        streams_rate = None
    unread = cold.reply.prompt_len - cold.reply.cached_len
    return Measured(
        prompt_len=cold.reply.prompt_len,
        cold_s=cold.reply.ttft_s,
        prefill_rate=unread / cold.reply.ttft_s,
        warm_s=warm.reply.ttft_s,
        reused=warm.reply.cached_len / warm.reply.prompt_len,
        decode_rate=decode_rate([warm]) or decode_rate([cold]),
        streams_rate=streams_rate,
    )


def decode_rate(answers: Sequence[Timed]) -> float | None:
    """
    Tokens a second of answers that were written at once, behind the first token.

    Returns:
        None where an answer is too short to tell.
    """
    lengths = [answer.reply.completion_len for answer in answers]
    seconds = max(a.ended for a in answers) - min(a.begun for a in answers)
    if min(lengths) < _MIN_STEPS or seconds <= 0:
        return None
    return sum(length - 1 for length in lengths) / seconds


def _ask(server: Server, body: Json) -> Timed:
    started = time.perf_counter()
    reply = server.chat(body)
    return Timed(reply, started, time.perf_counter())


def _body(options: argparse.Namespace, messages: Sequence[Json]) -> Json:
    return {
        "model": options.model,
        "messages": list(messages),
        "max_tokens": options.max_tokens,
        "temperature": 0,
    }


def _context(server: Server, model: str) -> int:
    """The most tokens that a model's prompt and answer may have together."""
    for entry in server.get("/v1/models")["data"]:
        if model in (entry["id"], *entry.get("aliases", ())):
            return int(entry.get("max_input_tokens") or _MAX_LEN)
    raise ServerError(f"no model {model!r} is served")


def _text(server: Server, model: str, length: int) -> Json:
    """A system message with which a prompt has about so many tokens; never asked."""
    chance = random.Random(secrets.token_bytes(8))
    words = chance.choices(_WORDS, k=length)
    about = _count(server, model, words)
    num_words = max(1, length * length // about)
    return _system(chance.choices(_WORDS, k=num_words))


def _count(server: Server, model: str, words: Sequence[str]) -> int:
    body = {"model": model, "messages": [_user(" ".join(words))]}
    return int(server.post("/v1/messages/count_tokens", body)["input_tokens"])


def _system(words: Sequence[str]) -> Json:
    return {"role": "system", "content": " ".join(words)}


def _user(text: str) -> Json:
    return {"role": "user", "content": text}


def _row(measured: Measured) -> str:
    return (
        f"{measured.prompt_len:>8} {measured.cold_s:>8.2f} s "
        f"{measured.prefill_rate:>11.1f} {measured.warm_s:>8.2f} s "
        f"{measured.reused:>8.1%} {_rate(measured.decode_rate):>11} "
        f"{_rate(measured.streams_rate):>11}"
    )


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _lengths(text: str) -> list[int]:
    """`1k,8000` as numbers of tokens."""
    found = []
    for word in text.lower().split(","):
        number, unit = word.removesuffix("k"), 1024 if word.endswith("k") else 1
        length = int(number) * unit if number.isdecimal() and len(number) < 9 else 0
        if not _SHORTEST <= length <= _MAX_LEN:
            raise argparse.ArgumentTypeError(
                f"each must be {_SHORTEST} to {_MAX_LEN} tokens, got {word!r}"
            )
        found.append(length)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mlx-sidecar bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_server_flags(parser, "MLX_API_KEY")
    parser.add_argument("--model", default="local", help="model (%(default)s)")
    parser.add_argument(
        "--lengths",
        type=_lengths,
        default="1k,8k,32k",
        help=f"tokens of the prompts, {_SHORTEST} or more each (%(default)s)",
    )
    parser.add_argument(
        "--streams",
        type=at_least(1),
        default=4,
        help="answers at once in the last column (%(default)s)",
    )
    parser.add_argument(
        "--max-tokens",
        type=at_least(16),
        default=128,
        help="longest answer, 16 or more; thinking counts (%(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON array")
    return parser
