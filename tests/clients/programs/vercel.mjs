// Vercel AI SDK: generateText / streamText with a tool loop, over each provider.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import * as toy from "./toy.mjs";
const require = createRequire(process.env.MODULES + "/package.json");
const load = async name => import(pathToFileURL(require.resolve(name)).href);
const { generateText, streamText, tool, stepCountIs, isStepCount } = await load("ai");
const { z } = await load("zod");
async function makeModel() {
  if (toy.WIRE === "messages") {
    const { createAnthropic } = await load("@ai-sdk/anthropic");
    return createAnthropic({ baseURL: toy.BASE + "/v1", apiKey: "any" })("local");
  }
  if (toy.WIRE === "compatible") {
    const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
    return createOpenAICompatible({ name: "local", baseURL: toy.BASE + "/v1", apiKey: "any", includeUsage: true })("local");
  }
  const { createOpenAI } = await load("@ai-sdk/openai");
  const openai = createOpenAI({ baseURL: toy.BASE + "/v1", apiKey: "any" });
  return toy.WIRE === "chat" ? openai.chat("local") : openai.responses("local");
}
const tools = {
  get_weather: tool({ description: "Tell the weather of a city",
    inputSchema: z.object({ city: z.string(), unit: z.enum(["celsius", "fahrenheit"]).optional() }),
    execute: async x => toy.getWeather(x) }),
  add: tool({ description: "Add two numbers",
    inputSchema: z.object({ a: z.number(), b: z.number(), note: z.string().optional() }),
    execute: async x => toy.add(x) }),
};
const model = await makeModel();
const providerOptions = toy.WIRE === "messages" ? { anthropic: { thinking: { type: "enabled", budgetTokens: 2048 } } }
  : toy.WIRE === "responses" ? { openai: { store: process.env.STORE === "1", reasoningSummary: "auto",
      ...(process.env.STORE === "1" ? {} : { include: ["reasoning.encrypted_content"] }) } } : {};
let messages = [];
const answers = [];
for (const prompt of toy.PROMPTS) {
  messages.push({ role: "user", content: prompt });
  const given = { model, system: toy.SYSTEM, messages, tools, maxRetries: 0, providerOptions, maxOutputTokens: 4096,
    stopWhen: (isStepCount ?? stepCountIs)(toy.MOST_STEPS) };
  let text, response, failed;
  if (toy.STREAM) {
    const result = streamText({ ...given, onError: ({ error }) => { failed = error; } });
    for await (const _part of result.fullStream);
    if (failed) { console.log("stream error", failed); process.exit(1); }
    text = await result.text; response = await result.response;
    if (result.responseMessages) response = { messages: await result.responseMessages };
  } else {
    const result = await generateText(given);
    text = result.text; response = result.response;
    if (result.responseMessages) response = { messages: result.responseMessages };
  }
  if (process.env.DEBUG) console.log(JSON.stringify(response.messages));
  messages = [...messages, ...response.messages];
  answers.push(text);
}
toy.finish(answers);
