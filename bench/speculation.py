"""
How many tokens a call says where an agent writes what it has read.

    python -m bench speculation REPOSITORY [--commits 40]

Each commit of a git repository that changes one file of text is a task: the file was
read with line numbers, as agents see it, and is written anew, whole or as an edit, in
the JSON of a call or as XML. The answers are given, so nothing but the drafts counts:
which tokens a draft gets right does not depend on the model.
"""

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.options import above_zero, positive
from sidecar.config.settings import GenerationConfig
from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.core.requests import GenerationOptions, SamplingParams
from sidecar.engine.job import ChoiceEnded, Job, JobFailed, Token
from sidecar.engine.sampling import LogitsProcessor, settle
from sidecar.engine.speculation.draft_length import LENGTHS, DraftPrices
from sidecar.engine.speculation.lookup_drafter import LookupDrafter, Sources
from sidecar.engine.speculation.row_speculation import RowSpeculation
from sidecar.engine.speculation.source_forms import written_forms
from sidecar.engine.speculation.speculating_batch import num_equal
from sidecar.engine.text_engine import TextEngine

_MAX_CHARS, _MIN_CHARS = 40_000, 600
_MAX_MEASURED, _MAX_SAID = 12_000, 1_500  # characters read, tokens said
_BEFORE_JOINING, _SECOND_SAID, _JOINS = 30, 80, 9
Encode = Callable[[str], list[int]]
_OPENER = "<tool_call>"


@dataclass(frozen=True, slots=True)
class Commit:
    """A file before a commit and behind it."""

    path: str
    before: str
    after: str


def commits(repository: Path, most: int) -> Iterator[Commit]:
    """The newest commits' files that were changed, one a commit, of fair size."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        done = subprocess.run(command, capture_output=True, check=True, timeout=60)
        return done.stdout.decode("utf-8", "replace")

    num_found = 0
    for commit in git("log", "--no-merges", "--format=%H", "-n", "2000").split():
        changed = git("diff-tree", "-r", "--diff-filter=M", "--name-only", commit)
        for path in changed.splitlines()[1:]:
            before, after = (git("show", f"{c}:{path}") for c in (f"{commit}^", commit))
            is_fair = all(_MIN_CHARS < len(t) < _MAX_CHARS for t in (before, after))
            if is_fair and "\ufffd" not in before + after:
                yield Commit(path, before, after)
                num_found += 1
                break
        if num_found == most:
            return


def shown(text: str) -> str:
    """A file as Claude Code's Read shows it."""
    lines = text.split("\n")
    return "\n".join(f"{number:>6}→{line}" for number, line in enumerate(lines, 1))


def edit_of(commit: Commit) -> tuple[str, str]:
    """What an edit call replaces, and by what: the changed lines, three around them."""
    old, new = commit.before.split("\n"), commit.after.split("\n")
    first = next(
        (n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )
    behind, most = 0, min(len(old), len(new)) - first
    while behind < most and old[-1 - behind] == new[-1 - behind]:
        behind += 1
    start, after = max(first - 3, 0), max(behind - 3, 0)
    return (
        "\n".join(old[start : len(old) - after]),
        "\n".join(new[start : len(new) - after]),
    )


def answers(commit: Commit, *, as_json: bool) -> dict[str, str]:
    """The call that writes it, whole and as an edit, as a model writes it."""
    old, new = edit_of(commit)
    calls = {
        "whole file": ("Write", {"file_path": commit.path, "content": commit.after}),
        "edit": (
            "Edit",
            {"file_path": commit.path, "old_string": old, "new_string": new},
        ),
    }
    return {
        kind: _json_call(*call) if as_json else _xml_call(*call)
        for kind, call in calls.items()
    }


def _json_call(name: str, arguments: dict[str, str]) -> str:
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{_OPENER}\n{call}\n</tool_call>"


def _xml_call(name: str, arguments: dict[str, str]) -> str:
    parts = [f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items()]
    return f"{_OPENER}\n<function={name}>\n{''.join(parts)}</function>\n</tool_call>"


def num_calls(said: Sequence[int], speculation: RowSpeculation) -> int:
    """How many forward passes an answer takes."""
    at = count = 0
    while at < len(said):
        drawn = functools.partial(said.__getitem__, at)
        draft = speculation.draft(drawn)
        count += 1
        num_right = 1
        if draft is not None and draft.ids[0] == said[at]:
            num_right = num_equal(draft.ids, said[at:])
            speculation.note(draft, num_right - 1)
        for token in said[at : at + num_right]:
            speculation.take(token)
        at += num_right
    return count


class FixedPrices(DraftPrices):
    """What one card was measured to take for eight rows instead of one."""

    def __init__(self, of_eight: float) -> None:
        super().__init__()
        self._each = (of_eight - 1) / 8

    def of(self, length: int) -> float:
        """In plain steps."""
        return 1 + self._each * length


def main(argv: list[str]) -> int:
    """Exit code 0; the tables go to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m bench speculation", description=__doc__
    )
    parser.add_argument("repository", type=Path, help="or what --save wrote")
    parser.add_argument("--save", type=Path, help="where to write the commits")
    parser.add_argument("--commits", type=positive, default=40)
    parser.add_argument("--price", type=above_zero, default=1.8, help="of eight tokens")
    parser.add_argument("--model", type=Path, help="measure its rates as well")
    parser.add_argument("--rounds", type=positive, default=6)
    options = parser.parse_args(argv)
    encode, opener_ids = _tokenizer(options.model)
    if options.repository.is_file():
        rows = json.loads(options.repository.read_text("utf-8"))
        found = [Commit(**row) for row in rows]
    else:
        try:
            found = [*commits(options.repository, options.commits)]
        except subprocess.CalledProcessError:
            parser.error(f"{options.repository} is no git repository")
    if not found:
        parser.error(f"no commit of {options.repository} changes one file of fair size")
    if options.save:
        rows = [asdict(commit) for commit in found]
        options.save.write_text(json.dumps(rows), "utf-8")
    sys.stdout.write(f"{len(found)} commits of {options.repository}\n")
    sys.stdout.write(f"{'answer':<22}{'tokens':>8}{'tokens a call':>15}\n")
    for name, tasks in _tasks(found, encode).items():
        calls = 0
        for task in tasks:
            texts = [task.prompt, *task.further]
            sources = Sources(texts, vocab_size=1 << 31)
            drafter = LookupDrafter(sources, task.prompt)
            prices = FixedPrices(options.price)
            calls += num_calls(task.said, RowSpeculation(drafter, prices, opener_ids))
        num_said = sum(len(task.said) for task in tasks)
        sys.stdout.write(f"{name:<22}{num_said:>8}{num_said / calls:>15.2f}\n")
    if options.model:
        short = [one for one in found if len(one.before) < _MAX_MEASURED]
        measured = _tasks(short[: options.rounds], encode)
        measured["prose"] = _prose(encode, options.rounds)
        _measure(options.model, measured)
    return 0


@dataclass(frozen=True, slots=True)
class Task:
    """What is read, what else may be repeated, and what is answered, as tokens."""

    prompt: list[int]
    further: list[list[int]]
    said: list[int]


def _tasks(found: Sequence[Commit], encode: Encode) -> dict[str, list[Task]]:
    tasks: dict[str, list[Task]] = defaultdict(list)
    for as_json in (True, False):
        for commit in found:
            text = shown(commit.before)
            prompt = encode(f"Read {commit.path}\n{text}\nassistant\n")
            forms = written_forms([text])
            for kind, answer in answers(commit, as_json=as_json).items():
                name = f"{kind} in {'JSON' if as_json else 'XML'}"
                further = [encode(form) for form in forms]
                tasks[name].append(Task(prompt, further, encode(answer)))
    return tasks


def _prose(encode: Encode, count: int) -> list[Task]:
    """Text that repeats nothing but its own words: pages of this project."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    texts = [
        page.read_text("utf-8")[:3_000] for page in pages if page.stat().st_size > 6000
    ]
    prompt = encode("Explain it at length.\nassistant\n")
    return [Task(prompt, [], encode(text)) for text in texts[:count]]


def _measure(model: Path, tasks: dict[str, list[Task]]) -> None:
    """Rates of a model that is made to say the answers, with drafts and without."""
    from testkit.jobs import leased_engine
    from testkit.scripted import Forced
    from testkit.servers import running_sidecar

    wanted: list[int] = []
    settings = {"MODEL_PATH": str(model), "SPECULATION": "auto"}

    def forced(_job: Job, _choice: int) -> list[LogitsProcessor]:
        return [Forced([*wanted])]

    sys.stdout.write(f"{'answer':<22}{'plain':>8}{'drafted':>9}{'ratio':>7}\n")
    with running_sidecar(settings, forced) as app, leased_engine(app) as engine:
        for name, each in tasks.items():
            rounds = []
            for number, task in enumerate(each):
                wanted[:] = task.said[:_MAX_SAID]
                order = ("off", "auto") if number % 2 else ("auto", "off")
                rounds.append({how: _rate(engine, task, how) for how in order})
            plain = statistics.median(one["off"] for one in rounds)
            drafted = statistics.median(one["auto"] for one in rounds)
            ratio = statistics.median(one["auto"] / one["off"] for one in rounds)
            prices = engine._loop._decode_batches.prices
            costs = " ".join(f"{n}:{prices.of(n):.2f}" for n in LENGTHS)
            sys.stdout.write(
                f"{name:<22}{plain:>8.1f}{drafted:>9.1f}{ratio:>7.2f}  {costs}\n"
            )
            sys.stdout.flush()
        wanted[:] = tasks["prose"][0].said[:_MAX_SAID]
        _measure_second(engine, tasks)


def _measure_second(engine: TextEngine, tasks: dict[str, list[Task]]) -> None:
    """What drafts of a first row cost a second one that joins."""
    first, said = tasks["whole file in JSON"][0], tasks["prose"][0].said
    drafted = replace(first, further=[said])  # it will be said by both
    second = Task(first.prompt[::-1], [], said)
    rounds = []
    for number in range(_JOINS):
        order = ("off", "auto") if number % 2 else ("auto", "off")
        found = {how: _second(engine, drafted, second, how) for how in order}
        rounds += [found] if number else []
    ttft = statistics.median(one["auto"].ttft_s / one["off"].ttft_s for one in rounds)
    rate = statistics.median(one["auto"].rate / one["off"].rate for one in rounds)
    sys.stdout.write(f"second row, auto / off: ttft {ttft:.3f}, rate {rate:.3f}\n")


def _rate(engine: TextEngine, task: Task, how: str) -> float:
    """Tokens a second behind the first one."""
    engine._config = replace(engine._config, speculation=how)
    job = _submitted(engine, task, min(len(task.said), _MAX_SAID))
    times = _times(engine, job)
    return (len(times) - 1) / (times[-1] - times[0])


@dataclass(frozen=True, slots=True)
class Joined:
    """What a second row saw: seconds to its first token, tokens a second then."""

    ttft_s: float
    rate: float


def _second(engine: TextEngine, first: Task, task: Task, how: str) -> Joined:
    """A row that joins one which is being drafted."""
    engine._config = replace(engine._config, speculation=how)
    engine.clear()
    running = _submitted(engine, first, min(len(first.said), _MAX_SAID))
    try:
        for _ in range(_BEFORE_JOINING):
            _token_at(running)
        started = time.perf_counter()
        times = _times(engine, _submitted(engine, task, _SECOND_SAID))
    finally:
        engine.release(running)
    return Joined(times[0] - started, (len(times) - 1) / (times[-1] - times[0]))


def _submitted(engine: TextEngine, task: Task, num_said: int) -> Job:
    options = GenerationOptions(max_tokens=num_said)
    sampling = settle(SamplingParams(temperature=0), GenerationConfig(), {})
    prompt = ModelPrompt(ModelIds(tuple(task.prompt)))
    return engine.submit(prompt, sampling, options, further=lambda: task.further)


def _times(engine: TextEngine, job: Job) -> list[float]:
    """When each token came."""
    times = []
    try:
        while (at := _token_at(job)) is not None:
            times.append(at)
    finally:
        engine.release(job)
    return times


def _token_at(job: Job) -> float | None:
    """When the next token came; None: the answer has ended."""
    while True:
        event = job.next_event(120)
        if event is None or isinstance(event, JobFailed):
            raise RuntimeError(f"no answer: {event}")
        if isinstance(event, Token):
            return time.perf_counter()
        if isinstance(event, ChoiceEnded):
            return None


def _tokenizer(folder: Path | None) -> tuple[Encode, frozenset[int]]:
    from tokenizers import Tokenizer

    from testkit.tiny_models import BUILTIN

    core = Tokenizer.from_file(str((folder or BUILTIN) / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        ids: list[int] = core.encode(text, add_special_tokens=False).ids
        return ids

    opener = core.token_to_id(_OPENER)
    return encode, frozenset() if opener is None else frozenset({opener})
