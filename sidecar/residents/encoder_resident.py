"""A loaded model that encodes: vectors of texts, or scores of pairs."""

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sidecar.core.errors import BadRequest, ContextLengthExceeded
from sidecar.engine.encoders import EncoderTurns, Rows

_TASK = (
    "Judge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".'
)
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer it"


@dataclass(frozen=True)
class EncoderResident:
    """
    What the pool leases to a request for vectors or scores.

    Args:
        max_tokens: of a text, or of a pair.
        is_pair: whether it reads query and document in one, as two texts.
    """

    name: str
    kind: str
    turns: EncoderTurns
    tokenizer: Any
    max_tokens: int
    num_bytes: int
    vocab_size: int
    is_pair: bool
    leave: Callable[[], None]
    _lock: threading.Lock

    takes_images = False
    failed_tests: tuple[str, ...] = ()

    @property
    def max_context(self) -> int:
        """Most tokens of a text."""
        return self.max_tokens

    def counters(self) -> dict[str, int]:
        """It keeps nothing that could be reused."""
        return {}

    def embed(
        self,
        inputs: Sequence[str | tuple[int, ...]],
        check: Callable[[], None],
        *,
        truncates: bool,
    ) -> tuple[Rows, int]:
        """
        A vector of length 1 for each input, and how many tokens were read.

        Raises:
            BadRequest: this model does not embed, or a token id is none of its own.
            ContextLengthExceeded: an input is too long, and is not to be cut.
        """
        if self.kind != "embedding":
            raise BadRequest(
                f"{self.name} is a {self.kind}, it gives no vectors", param="model"
            )
        found = [self._ids(item, f"input[{i}]") for i, item in enumerate(inputs)]
        ids = [self._fitting(x, f"input[{i}]", truncates) for i, x in enumerate(found)]
        return self.turns.encode(ids, check), sum(map(len, ids))

    def score(
        self,
        query: str,
        documents: Sequence[str],
        instruction: str | None,
        check: Callable[[], None],
    ) -> tuple[list[float], int]:
        """
        How well each document answers the query, 0..1, and the tokens that were read.

        Documents that are too long are cut: their beginning is judged.

        Raises:
            BadRequest: this model does not score. ContextLengthExceeded: the query.
        """
        if self.kind != "reranker":
            raise BadRequest(
                f"{self.name} is no reranker, it gives no scores", param="model"
            )
        if self.is_pair:
            ids, second = self._pairs(query, documents)
        else:
            ids, second = self._questions(query, documents, instruction), None
        scores = self.turns.encode(ids, check, second)
        return [float(row[0]) for row in scores], sum(map(len, ids))

    def close(self) -> int:
        """Give the weights back; the bytes. A second time does nothing."""
        if self.turns.is_closed:
            return 0
        freed = self.turns.close()
        self.leave()
        return freed

    def _ids(self, item: str | tuple[int, ...], path: str) -> list[int]:
        if isinstance(item, str):
            with self._lock:
                return list(self.tokenizer.encode(item))
        if max(item) >= self.vocab_size:
            raise BadRequest(
                f"{path} holds token ids beyond 0..{self.vocab_size - 1}", param=path
            )
        return list(item)

    def _fitting(self, ids: list[int], path: str, truncates: bool) -> list[int]:
        if len(ids) <= self.max_tokens:
            return ids
        if truncates:
            return ids[: self.max_tokens]
        raise ContextLengthExceeded(
            f"{path} has {len(ids)} tokens, this model takes {self.max_tokens}; "
            "truncate: true cuts it",
            param=path,
            num_tokens=len(ids),
        )

    def _pairs(
        self, query: str, documents: Sequence[str]
    ) -> tuple[list[list[int]], list[int] | None]:
        self._require_room(self._ids(query, "query"))
        with self._lock:
            found = self.tokenizer(
                [query] * len(documents),
                list(documents),
                truncation="only_second",
                max_length=self.max_tokens,
            )
        ids = [list(row) for row in found["input_ids"]]
        if "token_type_ids" not in found:
            return ids, None
        return ids, [
            row.index(1) if 1 in row else len(row)
            for row in map(list, found["token_type_ids"])
        ]

    def _questions(
        self, query: str, documents: Sequence[str], instruction: str | None
    ) -> list[list[int]]:
        """The beginning of a chat each, whose answer is yes or no."""
        first, second, tail = self._frame()
        with self._lock:
            before = self._plain(first)
            before += self._typed(instruction or _INSTRUCTION)
            before += [*self._plain(second), *self._typed(query)]
            before += self._plain("\n<Document>: ")
            behind = self._plain(tail)
            found = [self._typed(document) for document in documents]
        room = self.max_tokens - len(before) - len(behind)
        self._require_room([*before, *behind])
        return [[*before, *ids[:room], *behind] for ids in found]

    def _frame(self) -> tuple[str, str, str]:
        """What the template puts before the task, before the query, and at the end."""
        marks = ("zqtask", "zqquery")
        content = f"<Instruct>: {marks[0]}\n<Query>: {marks[1]}"
        talk = [
            {"role": "system", "content": _TASK},
            {"role": "user", "content": content},
        ]
        try:
            text = self.tokenizer.apply_chat_template(
                talk, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except Exception as error:  # templates raise what they like
            raise BadRequest(
                f"{self.name}: its chat template refuses to be asked", param="model"
            ) from error
        first, _, rest = str(text).partition(marks[0])
        second, _, tail = rest.partition(marks[1])
        has_thinking = "<think>" in self.tokenizer.get_added_vocab()
        if has_thinking and "<think>" not in tail:  # its template knows none
            tail += "<think>\n\n</think>\n\n"
        return first, second, tail

    def _plain(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _typed(self, text: str) -> list[int]:
        """Of what a client wrote: none of it ends a turn or begins one."""
        tokens = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        found = re.finditer("|".join(map(re.escape, tokens)), text) if tokens else ()
        cuts = [0, *(match.start() + 1 for match in found), len(text)]
        return [i for a, b in itertools.pairwise(cuts) for i in self._plain(text[a:b])]

    def _require_room(self, ids: Sequence[int]) -> None:
        if len(ids) >= self.max_tokens:
            raise ContextLengthExceeded(
                f"query leaves no room for a document in {self.max_tokens} tokens",
                param="query",
                num_tokens=len(ids),
            )
