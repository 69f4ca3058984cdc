"""pydantic-ai over chat, responses and messages; run and streamed."""

import asyncio
from typing import Any

import toy
from pydantic_ai import Agent
from pydantic_ai.usage import UsageLimits


def make_model() -> Any:
    if toy.WIRE == "messages":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel(
            toy.MODEL, provider=AnthropicProvider(api_key=toy.KEY, base_url=toy.BASE)
        )
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIChatModel if toy.WIRE == "chat" else OpenAIResponsesModel
    return kind(
        toy.MODEL, provider=OpenAIProvider(base_url=f"{toy.BASE}/v1", api_key=toy.KEY)
    )


async def main() -> list[str]:
    settings: Any = {"max_tokens": 4096}
    if toy.WIRE == "messages":
        settings["anthropic_thinking"] = {"type": "enabled", "budget_tokens": 2048}
    agent = Agent(
        make_model(), instructions=toy.SYSTEM, tools=[toy.get_weather, toy.add],
        model_settings=settings,
    )  # fmt: skip
    history: Any = None
    answers = []
    limits = UsageLimits(request_limit=toy.MAX_STEPS)
    for prompt in toy.PROMPTS:
        if toy.STREAM:
            async with agent.iter(
                prompt, message_history=history, usage_limits=limits
            ) as run:
                async for node in run:
                    if Agent.is_model_request_node(node):
                        async with node.stream(run.ctx) as stream:
                            async for _event in stream:
                                pass
            result: Any = run.result
        else:
            result = await agent.run(
                prompt, message_history=history, usage_limits=limits
            )
        history = result.all_messages()
        answers.append(str(result.output))
    return answers


toy.finish(asyncio.run(main()))
