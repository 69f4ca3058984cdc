"""litellm.completion as an SDK, against the proxy."""

import json
from typing import Any

import litellm
import toy

FUNCTIONS = [
    {
        "name": "get_weather",
        "description": toy.WEATHER_TEXT,
        "parameters": toy.WEATHER_SCHEMA,
    },
    {"name": "add", "description": toy.ADD_TEXT, "parameters": toy.ADD_SCHEMA},
]
MODELS = {
    "chat": ("openai/local", f"{toy.BASE}/v1"),
    "messages": ("anthropic/local", toy.BASE),
    "responses": ("openai/responses/local", f"{toy.BASE}/v1"),
}
model, base = MODELS[toy.WIRE]
messages: list[Any] = [{"role": "system", "content": toy.SYSTEM}]
answers = []
for prompt in toy.PROMPTS:
    messages.append({"role": "user", "content": prompt})
    for _ in range(toy.MAX_STEPS):
        same: Any = {
            "model": model, "api_base": base, "api_key": toy.KEY, "messages": messages,
            "tools": [{"type": "function", "function": f} for f in FUNCTIONS],
            "max_tokens": 4096, "num_retries": 0,
        }  # fmt: skip
        if toy.STREAM:
            chunks = list(litellm.completion(**same, stream=True))
            done: Any = litellm.stream_chunk_builder(chunks, messages=messages)
        else:
            done = litellm.completion(**same)
        message = done.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            result = toy.call(call.function.name, json.loads(call.function.arguments))
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": result}
            )
        if not message.tool_calls:
            break
    answers.append(message.content or "")
toy.finish(answers)
