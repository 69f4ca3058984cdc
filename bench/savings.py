"""What a prefix cache saved of a client's requests: sums, bars, Markdown tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.threads import thread_places
from testkit.counted import COUNTED, Counted
from testkit.reuse import Served

MIN_OF_ORACLE = 0.99
MIN_APPENDED = 0.97
_FIRST_APPENDED = 3


@dataclass(frozen=True, slots=True)
class Saving:
    """
    One client's requests. All sums but `appended` are from the second request on.

    Args:
        prompt, prefilled: tokens.
        oracle: tokens that the best exact reuse of the same prompts would prefill.
        num_appended, appended_prompt, appended_cached: the third and later requests
            of threads whose history is only appended to.
        theirs: what the peer prefilled, and what exact prefixes would have had it
            prefill with the recorded answers as its own; None if it was not asked.
    """

    name: str
    num_requests: int
    prompt: int
    prefilled: int
    oracle: int
    num_appended: int
    appended_prompt: int
    appended_cached: int
    theirs: tuple[int, int] | None

    @property
    def counted(self) -> Counted:
        """What others counted for it."""
        return COUNTED[self.name]

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that were not prefilled."""
        return 1 - self.prefilled / self.prompt

    @property
    def of_oracle(self) -> float:
        """Tokens not prefilled, by the most that exact reuse could have saved."""
        return (self.prompt - self.prefilled) / (self.prompt - self.oracle)

    @property
    def appended_rate(self) -> float | None:
        """The hit rate where the history is append-only; None if it nowhere is."""
        if not self.appended_prompt:
            return None
        return self.appended_cached / self.appended_prompt

    @property
    def passed(self) -> bool:
        """Whether both bars are kept."""
        appended = self.appended_rate
        return self.of_oracle >= MIN_OF_ORACLE and (
            appended is None or appended >= MIN_APPENDED
        )


def saving_of(
    name: str, served: Sequence[Served], theirs: Sequence[Sequence[int]] | None = None
) -> Saving:
    """Sum a client's requests up."""
    places = thread_places([turn.body for turn in served])
    appended = [
        turn
        for turn, place in zip(served, places, strict=True)
        if place >= _FIRST_APPENDED
    ]
    later = served[1:]
    return Saving(
        name,
        len(served),
        sum(turn.prompt_len for turn in later),
        sum(turn.prefilled_len for turn in later),
        sum(turn.prompt_len - turn.oracle_len for turn in later),
        len(appended),
        sum(turn.prompt_len for turn in appended),
        sum(turn.cached_len for turn in appended),
        (sum(theirs[0][1:]), sum(theirs[1][1:])) if theirs else None,
    )


def prefill_table(savings: Sequence[Saving]) -> str:
    """What was prefilled, and what others would have to."""
    columns = (
        "client", "requests", "prompt tokens", "prefilled", "exact prefixes only",
        "pinned and spliced", "oracle", "hit rate",
    )  # fmt: skip
    rows = [
        (
            saving.name, saving.num_requests, saving.prompt, saving.prefilled,
            saving.counted.exact, saving.counted.pinned, saving.oracle,
            _percent(saving.hit_rate),
        )
        for saving in savings
    ]  # fmt: skip
    sums = [sum(map(int, (row[i] for row in rows))) for i in range(1, 7)]
    total = ("**all**", *sums, _percent(1 - sums[2] / sums[1]))
    return _markdown(columns, [*rows, total])


def bar_table(savings: Sequence[Saving]) -> str:
    """Both bars, and what they are held against."""
    columns = (
        "client", f"of the oracle (>= {MIN_OF_ORACLE})", "append-only requests",
        f"their hit rate (>= {MIN_APPENDED:.0%})", "verdict",
    )  # fmt: skip
    rows = [
        (
            saving.name, f"{saving.of_oracle:.4f}", saving.num_appended,
            _percent(saving.appended_rate), "pass" if saving.passed else "**FAIL**",
        )
        for saving in savings
    ]  # fmt: skip
    return _markdown(columns, rows)


def peer_table(savings: Sequence[Saving]) -> str:
    """Prefilled tokens beside mlx_lm.server's."""
    rows = [(s.name, s.prefilled, *s.theirs) for s in savings if s.theirs]
    sums = ("**all**", *(sum(column) for column in list(zip(*rows, strict=True))[1:]))
    columns = (
        "client", "prefilled, ours", "mlx_lm.server", "theirs / ours",
        "with the recorded answers", "that / ours",
    )  # fmt: skip
    return _markdown(
        columns,
        [
            (name, ours, asked, _times(asked, ours), told, _times(told, ours))
            for name, ours, asked, told in [*rows, sums]
        ],
    )


def as_json(saving: Saving, served: Sequence[Served]) -> dict[str, Any]:
    """Everything about a client, without its texts."""
    names = ("seq", "prompt_len", "cached_len", "oracle_len")
    return {
        **asdict(saving),
        "counted": asdict(saving.counted),
        "hit_rate": saving.hit_rate,
        "of_oracle": saving.of_oracle,
        "appended_rate": saving.appended_rate,
        "passed": saving.passed,
        "requests": [{name: getattr(turn, name) for name in names} for turn in served],
    }


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)]]
    lines += [[_cell(value) for value in row] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"


def _times(theirs: int, ours: int) -> str:
    return f"{theirs / ours:.2f}"
