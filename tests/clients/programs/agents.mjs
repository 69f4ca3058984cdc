// OpenAI Agents JS: chat completions and responses, whole and streamed.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import * as toy from "./toy.mjs";
const require = createRequire(process.env.MODULES + "/package.json");
const load = async name => import(pathToFileURL(require.resolve(name)).href);
const { Agent, run, tool, setTracingDisabled, OpenAIChatCompletionsModel, OpenAIResponsesModel } = await load("@openai/agents");
const { z } = await load("zod");
const OpenAI = (await load("openai")).default;
setTracingDisabled(true);
const client = new OpenAI({ baseURL: toy.BASE + "/v1", apiKey: "any", maxRetries: 0 });
const agent = new Agent({
  name: "toy", instructions: toy.SYSTEM,
  model: toy.WIRE === "chat" ? new OpenAIChatCompletionsModel(client, "local") : new OpenAIResponsesModel(client, "local"),
  tools: [
    tool({ name: "get_weather", description: "Tell the weather of a city",
      parameters: z.object({ city: z.string(), unit: z.enum(["celsius", "fahrenheit"]) }), execute: async x => toy.getWeather(x) }),
    tool({ name: "add", description: "Add two numbers",
      parameters: z.object({ a: z.number(), b: z.number(), note: z.string() }), execute: async x => toy.add(x) }),
  ],
});
let history = [], previous;
const answers = [];
for (const prompt of toy.PROMPTS) {
  const stateful = toy.WIRE === "previous_id";
  const input = stateful ? [{ role: "user", content: prompt }] : [...history, { role: "user", content: prompt }];
  const result = await run(agent, input, { maxTurns: toy.MOST_STEPS, stream: toy.STREAM, previousResponseId: stateful ? previous : undefined });
  if (toy.STREAM) { for await (const _event of result); await result.completed; if (result.error) throw result.error; }
  history = result.history; previous = result.lastResponseId;
  answers.push(String(result.finalOutput));
}
toy.finish(answers);
