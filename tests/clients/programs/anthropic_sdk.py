"""The anthropic SDK: content blocks sent back as they came, thinking included."""

from typing import Any

import anthropic
import toy

client = anthropic.Anthropic(base_url=toy.BASE, api_key=toy.KEY, max_retries=0)
TOOLS = [
    {
        "name": "get_weather",
        "description": toy.WEATHER_TEXT,
        "input_schema": toy.WEATHER_SCHEMA,
    },
    {"name": "add", "description": toy.ADD_TEXT, "input_schema": toy.ADD_SCHEMA},
]
SYSTEM = [{"type": "text", "text": toy.SYSTEM, "cache_control": {"type": "ephemeral"}}]
messages: list[Any] = []
answers = []
signatures = []
for prompt in toy.PROMPTS:
    messages.append({"role": "user", "content": prompt})
    for _ in range(toy.MAX_STEPS):
        same: Any = {
            "model": toy.MODEL, "max_tokens": 4096, "system": SYSTEM,
            "messages": messages, "tools": TOOLS,
            "thinking": {"type": "enabled", "budget_tokens": 2048},
        }  # fmt: skip
        if toy.STREAM:
            with client.messages.stream(**same) as stream:
                for _text in stream.text_stream:
                    pass
                done = stream.get_final_message()
        else:
            done = client.messages.create(**same)
        assert done.usage.output_tokens > 0, done.usage
        blocks = [block.model_dump(exclude_none=True) for block in done.content]
        signatures += [b.get("signature") for b in blocks if b["type"] == "thinking"]
        empty = [b for b in blocks if b["type"] == "text" and not b["text"]]
        assert not empty, f"an empty text block: {blocks}"
        messages.append({"role": "assistant", "content": blocks})
        uses = [block for block in done.content if block.type == "tool_use"]
        if not uses:
            break
        messages.append(
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": u.id,
                        "content": toy.call(u.name, u.input),
                    }
                    for u in uses
                ],
            }
        )
    answers.append("".join(b.text for b in done.content if b.type == "text"))
print("thinking blocks", len(signatures), "signed", sum(bool(s) for s in signatures))
assert signatures, "no thinking came"
assert all(signatures), "thinking without a signature"
toy.finish(answers)
