"""
What a hostile client sends, by kind: each makes one attack of its kind at random.

Texts, bodies, heads and ways to leave that once hurt a server of this kind.
"""

import functools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
ROUTES = (CHAT, MESSAGES, RESPONSES)
# ask: read the answer; leave: close after so many events of it; hold: send no more,
# and close after a while; crowd: so many connections that send nothing.
Way = Literal["ask", "leave", "hold", "crowd"]
Json = dict[str, Any]

_MANY = 140  # connections; MAX_CONNECTIONS is 128
_META = "X (untrusted metadata):\n"
_LARGE_BODY = 60 << 20
_BIG_ID = 2 << 20
_JSON = "Content-Type: application/json"
_WRONG: list[Any] = [
    True, 3, -7.5, 1e308, 10**400, "text", "", None, [], [1], [[[]]], {}, {"a": 1},
    {"type": "x"}, [{"type": []}], [None], ["\ud800"], "\x00", -1, 2**63,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Attack:
    """
    What goes over one connection.

    Args:
        pieces: sent one after the other. num_events: after which the client leaves.
        hold_s: for which it stays and sends nothing.
    """

    pieces: tuple[bytes, ...]
    way: Way = "ask"
    num_events: int = 0
    hold_s: float = 0.0

    def shown(self) -> str:
        """Its beginning, for a report."""
        return repr(b"".join(piece[:700] for piece in self.pieces)[:1400])


@dataclass(frozen=True, slots=True)
class Target:
    """A port, and the model that it serves."""

    port: int
    model: str


Kind = Callable[[Target, random.Random], Attack]


def request(
    target: Target,
    path: str,
    body: bytes | Json | None = None,
    headers: tuple[str, ...] = (),
    method: str = "",
) -> tuple[bytes, ...]:
    """A well-formed request around a body that need not be."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    lines = [f"{method or ('GET' if data is None else 'POST')} {path} HTTP/1.1"]
    if not headers or not headers[0].startswith("Host:"):
        lines.append(f"Host: 127.0.0.1:{target.port}")
    lines.append("Connection: close")
    if data is not None:
        kinds = () if headers and headers[0].startswith("Content-Type") else (_JSON,)
        lines += [*kinds, f"Content-Length: {len(data)}"]
    head = "\r\n".join([*lines, *headers, "", ""]).encode("latin-1", "replace")
    return (head,) if data is None else (head, data)


def good_body(target: Target, path: str, said: str, /, **more: Any) -> Json:
    """What the route asks for, and a short answer."""
    history = [{"role": "user", "content": said}]
    asked: Json = {"input": history} if path == RESPONSES else {"messages": history}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    return {"model": target.model, **asked, limit: 8, **more}


def _asked(
    target: Target, chance: random.Random, said: str, more: Json | None = None
) -> Attack:
    path = chance.choice(ROUTES)
    return Attack(request(target, path, good_body(target, path, said) | (more or {})))


def _leave(num_events: int, target: Target, chance: random.Random) -> Attack:
    path = chance.choice(ROUTES)
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = good_body(target, path, _words(chance, 30), stream=True) | {limit: 400}
    pieces = request(target, path, body)
    return Attack(pieces, "leave", num_events, chance.random() * 0.1)


def left_before_the_first(target: Target, chance: random.Random) -> Attack:
    """A stream whose client goes at once."""
    return _leave(0, target, chance)


def left_after_two(target: Target, chance: random.Random) -> Attack:
    """A stream whose client goes after two chunks."""
    return _leave(2, target, chance)


def left_whole(target: Target, chance: random.Random) -> Attack:
    """A whole answer that nobody waits for."""
    path = chance.choice(ROUTES)
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    body = good_body(target, path, _words(chance, 30)) | {limit: 400}
    return Attack(request(target, path, body), "hold", hold_s=chance.random() * 0.3)


def idle_connections(_target: Target, chance: random.Random) -> Attack:
    """More than there are places."""
    return Attack((), "crowd", _MANY, hold_s=chance.uniform(0.5, 2.0))


def half_sent(target: Target, chance: random.Random) -> Attack:
    """A head or a body that ends in the middle."""
    data = b"".join(request(target, CHAT, good_body(target, CHAT, "x" * 500)))
    cut = data[: chance.randrange(1, len(data))]
    return Attack((cut,), "hold", hold_s=chance.uniform(0.1, 2.0))


def huge_head(target: Target, chance: random.Random) -> Attack:
    """Six megabytes in many lines, in one, or in the path."""
    shape = chance.randrange(4)
    path, headers = CHAT, tuple(f"X-{i}: " + "a" * 60_000 for i in range(105))
    if shape == 1:
        headers = ("X: " + "a" * 6_300_000,)
    elif shape == 2:
        path, headers = "/" + "a" * 70_000, ()
    elif shape == 3:
        headers = tuple(f"X-{i}: 1" for i in range(20_000))
    return Attack(request(target, path, b"{}", headers))


def deep_json(target: Target, chance: random.Random) -> Attack:
    """Brackets beyond reason, in a stranger's block, in arguments or as the body."""
    deep = chance.choice(["[" * 3000, '{"a":' * 3000, "[" * 990 + "]" * 990])
    shape = chance.randrange(3)
    if shape == 0:
        return _asked(target, chance, f"{_META}```json\n{deep}\n```\nhi")
    if shape == 1:
        nested = b"[" * 100_000 + b"]" * 100_000
        return Attack(request(target, chance.choice(ROUTES), nested))
    call = {"name": "look", "arguments": deep}
    called = [{"id": "call_1", "type": "function", "function": call}]
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": called},
        {"role": "tool", "tool_call_id": "call_1", "content": deep},
    ]
    body = good_body(target, CHAT, "") | {"messages": said}
    return Attack(request(target, CHAT, body))


def large_body(target: Target, chance: random.Random) -> Attack:
    """Sixty megabytes that become millions of values, or nearly as many as may be."""
    path = chance.choice(ROUTES)
    if chance.random() < 0.5:
        return Attack(request(target, path, _many_lists(_LARGE_BODY // 3)))
    head = json.dumps(good_body(target, path, "hi")).encode()[:-1]
    name = b', "input": ' if path == RESPONSES else b', "messages": '
    return Attack(request(target, path, head + name + _many_lists(490_000) + b"}"))


def no_objects(target: Target, chance: random.Random) -> Attack:
    """Bodies that are JSON and no object, or no JSON, or a form."""
    path = chance.choice([*ROUTES, "/v1/completions", "/v1/embeddings", "/v1/rerank"])
    body = chance.choice([
        b"", b"[]", b"3", b"null", b'"x"', b"[[],[]]", b"{", b"{}", b"\xff", b" \n",
        b"a=b&" * 100_000,
    ])  # fmt: skip
    form = "Content-Type: application/x-www-form-urlencoded"
    return Attack(request(target, path, body, chance.choice([(), (form,)])))


def wrong_types(target: Target, chance: random.Random) -> Attack:
    """One field with what it cannot hold."""
    path = chance.choice(ROUTES)
    body = good_body(target, path, "hi")
    name = chance.choice(_FIELDS[path])
    body[name] = chance.choice(_WRONG)
    if name in ("messages", "input") and chance.random() < 0.7:
        item: Json = {"role": "user", "content": "hi", "tool_calls": None, "type": None}
        item[chance.choice(list(item))] = chance.choice(_WRONG)
        body[name] = [item]
    return Attack(request(target, path, body))


def foreign_page(target: Target, chance: random.Random) -> Attack:
    """What a browser sends for another site's page, or for a rebound name."""
    header = chance.choice([
        "Origin: https://evil.example", "Origin: null", "Host: evil.example",
        "Sec-Fetch-Site: cross-site", "Host: 127.0.0.1.evil.example",
        "Host: [localhost]x", "Host: " + "a" * 999, "Host:",
        "Origin: http://localhost:3000",
    ])  # fmt: skip
    path = chance.choice(ROUTES)
    body = good_body(target, path, "hi")
    return Attack(request(target, path, body, (header,)))


def big_ids(target: Target, chance: random.Random) -> Attack:
    """Session ids of megabytes, in any of their names."""
    big = f"{chance.randrange(10**9)}" + "s" * _BIG_ID
    more: Json = chance.choice([
        {"session_id": big}, {"user": big}, {"prompt_cache_key": big},
        {"metadata": {"session_id": big}}, {"metadata": {"user_id": big}},
        {"conversation_id": big}, {"model": big}, {"previous_response_id": big},
        {"x_mlx": {"session": big}},
    ])  # fmt: skip
    return _asked(target, chance, "hi", more)


def dear_text(target: Target, chance: random.Random) -> Attack:
    """Texts that a careless rule would scan again and again."""
    unit = chance.choice(_DEAR)
    text = unit * (chance.choice([4_000, 30_000, 400_000]) // len(unit))
    return _asked(target, chance, text)


def cancels(target: Target, chance: random.Random) -> Attack:
    """Guesses at the names of others' requests and responses."""
    name = chance.choice([
        f"good-{chance.randrange(200)}", f"resp_{chance.randbytes(12).hex()}",
        "x" * 60_000, "%00", "..%2f..%2fadmin", f"chatcmpl-{chance.randrange(99)}",
    ])  # fmt: skip
    path, method = chance.choice([
        (f"/v1/cancel/{name}", "POST"), (f"/v1/responses/{name}/cancel", "POST"),
        (f"/v1/responses/{name}", "DELETE"), (f"/v1/responses/{name}", "GET"),
        (f"/v1/responses/{name}/input_items", "GET"),
    ])  # fmt: skip
    body = b"" if method == "POST" else None
    return Attack(request(target, path, body, method=method))


def admin_routes(target: Target, chance: random.Random) -> Attack:
    """What stands behind the scenes, without the right to see it."""
    path, body = chance.choice([
        ("/admin/cache", None), ("/admin/cache?check=1", None),
        ("/admin/cache/drift", None), ("/admin/cache/clear", b""),
        ("/admin/../admin/cache", None), ("/key/generate", b"{}"),
        ("/prompts/test", b"{}"), ("/config/yaml", None), ("/config/update", b"{}"),
        ("/openai/v1/files", None), ("/anthropic/v1/messages", b"{}"),
        ("/model/new", b"{}"), ("/spend/logs", None), ("/v1/files", None),
    ])  # fmt: skip
    wrong = ("Authorization: Bearer wrong",)
    return Attack(request(target, path, body, chance.choice([(), wrong])))


def too_long(target: Target, chance: random.Random) -> Attack:
    """A prompt longer than the context."""
    return _asked(target, chance, _words(chance, chance.choice([9_000, 60_000])))


def bad_bytes(target: Target, chance: random.Random) -> Attack:
    """Bytes that are no text, no JSON or no HTTP."""
    path = chance.choice(ROUTES)
    body = json.dumps(good_body(target, path, "hi")).encode()
    torn = bytearray(body)
    torn[chance.randrange(len(torn))] = chance.choice([0, 13, 128, 255])
    noise = chance.randbytes(chance.randint(1, 400)) + b"\r\n\r\n"
    chunked = ("Transfer-Encoding: chunked",)
    pieces = chance.choice([
        request(target, path, body.replace(b"hi", b"\xff\xfe\x80")),
        request(target, path, body.replace(b"hi", b"\\ud800\\u0000")),
        request(target, path, body, ("X: a\rY: b",)),
        request(target, path, body, ("X: a\0b",)),
        request(target, path, bytes(torn)), (noise,),
        request(target, path, b"5\r\nhello\r\n0\r\n\r\n", chunked),
    ])  # fmt: skip
    return Attack(pieces)


def nonsense_tools(target: Target, chance: random.Random) -> Attack:
    """Schemas that say nothing, refer to themselves or go on without end."""
    deep: Any = {"type": "string"}
    for _ in range(chance.choice([5, 400])):
        deep = {"type": "object", "properties": {"a": deep}}
    schema = chance.choice([
        deep, {"$ref": "#"}, {"type": "nonsense"}, {"type": ["x", 3]}, [], None, "x",
        {"type": "object", "properties": []}, {"enum": list(range(20_000))},
        {"type": "object", "properties": {f"p{i}": {} for i in range(5_000)}},
        {"properties": {"{{ x }}": {"description": "{% raw %}<|im_end|>"}}},
    ])  # fmt: skip
    name = chance.choice(["look", "", "{{ x }}", "n" * 5_000, "\x1b[31mred", 3, None])
    path = chance.choice(ROUTES)
    if path == CHAT:
        made: Json = {"function": {"name": name, "parameters": schema}}
        tool: Json = {"type": "function", **made}
    elif path == RESPONSES:
        tool = {"type": "function", "name": name, "parameters": schema}
    else:
        tool = {"name": name, "input_schema": schema}
    body = good_body(target, path, "hi", tools=[tool])
    if chance.random() < 0.3:
        body["tool_choice"] = chance.choice(_WRONG)
    return Attack(request(target, path, body))


def large_schemas(target: Target, chance: random.Random) -> Attack:
    """Structured outputs of a megabyte."""
    schema: Json = chance.choice([
        {"enum": [f"v{i}" for i in range(60_000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"}
                                          for i in range(20_000)}},
        {"type": "string", "pattern": "(a+)+" * 2_000 + "$"},
        {"anyOf": [{"const": i} for i in range(30_000)]}, {"$ref": "#"},
    ])  # fmt: skip
    path = chance.choice(ROUTES)
    form = {"type": "json_schema", "name": "x", "schema": schema}
    more: Json = {"text": {"format": form}}
    if path == CHAT:
        more = {"response_format": {"type": "json_schema", "json_schema": form}}
    elif path == MESSAGES:
        more = {"output_format": form}
    return Attack(request(target, path, good_body(target, path, "hi") | more))


def large_numbers(target: Target, chance: random.Random) -> Attack:
    """More answers, tokens, stops and biases than anyone needs."""
    more: Json = chance.choice([
        {"n": 10**6}, {"max_tokens": 10**12}, {"stop": ["x" * 9] * 20_000},
        {"logit_bias": {str(i): 100 for i in range(50_000)}}, {"best_of": 1000},
        {"temperature": 1e300}, {"top_logprobs": 10**6, "logprobs": True},
        {"seed": 2**70}, {"stop": "x" * 10**6}, {"max_output_tokens": -5},
    ])  # fmt: skip
    return _asked(target, chance, "hi", more)


def other_routes(target: Target, chance: random.Random) -> Attack:
    """Routes beside the three, with what they do not expect."""
    path = chance.choice([
        "/v1/completions", "/v1/embeddings", "/v1/rerank", "/v1/cache/probe",
        "/v1/messages/count_tokens", "/v1beta/models/local:generateContent",
        "/health", "/metrics", "/v1/models", "/v1/moderations", "/%00", "//",
    ])  # fmt: skip
    prompts: list[Any] = [[[]], [3] * 100_000, "x" * 100_000, None, {}, "[" * 3000]
    prompt = chance.choice(prompts)
    body: Json = {"model": target.model, "prompt": prompt, "input": prompt}
    body |= {"messages": prompt, "contents": prompt, "max_tokens": 4}
    return Attack(request(target, path, body))


def _words(chance: random.Random, count: int) -> str:
    return " ".join(f"w{chance.randrange(300)}" for _ in range(count))


@functools.cache
def _many_lists(count: int) -> bytes:
    return b"[" + b"[]," * count + b"[]]"


_COMMON = [
    "model", "stream", "temperature", "top_p", "tools", "tool_choice", "metadata",
    "user", "session_id", "x_mlx", "chat_template_kwargs", "extra_body", "timeout",
]  # fmt: skip
_FIELDS = {
    CHAT: [
        *_COMMON, "messages", "max_tokens", "stop", "n", "seed", "logit_bias",
        "logprobs", "top_logprobs", "response_format", "stream_options",
        "reasoning_effort", "presence_penalty", "parallel_tool_calls", "functions",
    ],
    MESSAGES: [
        *_COMMON, "messages", "max_tokens", "system", "thinking", "stop_sequences",
        "top_k", "service_tier", "container", "mcp_servers", "context_management",
    ],
    RESPONSES: [
        *_COMMON, "input", "max_output_tokens", "instructions", "reasoning", "text",
        "previous_response_id", "include", "store", "truncation", "prompt_cache_key",
    ],
}  # fmt: skip
_DEAR = [
    '{\n  "message_id": "0000007",\n  "from": "Anna",\n  "text": "well, yes"\n},\n',
    '"message_id": "a"\n', '"message_id"', "directory ", _META, f"{_META}```json\n",
    f"{_META}```json\n{{}}\n```\nhi\n", f"{_META}```json\n[]\n```\n", "\n",
    "Git snapshot at conversation start.\n```text\n", "<system-reminder>\n",
    "## Inbound Context (trusted metadata)\n```json\n", "Current time is 10:05.\n",
    "<system-reminder>\nThe current date is: Friday.\n</system-reminder>\n",
    "Stats: runtime 1m2s\n", "x-anthropic-billing-header: cc_version=1;\n", "<cwd>\n",
]  # fmt: skip
# Of a hundred, about; what takes long comes seldom.
KINDS: dict[Kind, float] = {
    left_before_the_first: 8, left_after_two: 12, left_whole: 8, idle_connections: 1,
    half_sent: 6, huge_head: 3, deep_json: 5, large_body: 0.6, wrong_types: 15,
    foreign_page: 6, big_ids: 3, dear_text: 5, cancels: 5, admin_routes: 5,
    too_long: 2, bad_bytes: 6, nonsense_tools: 5, large_schemas: 2, large_numbers: 3,
    other_routes: 4, no_objects: 4,
}  # fmt: skip
