// What the JS loops share: as toy.py.
export const BASE = process.env.BASE, STREAM = process.env.STREAM === "1", WIRE = process.env.WIRE ?? "chat";
export const MOST_STEPS = 16;
export const SYSTEM = `You are agent ${process.env.CASE}. Use the tools, one step at a time.\n` +
  Array.from({length: 90}, (_, n) => `Rule ${n}: when a person asks about item ${n}, look at shelf ${n * 7 % 101} first, tell them ` +
    "what you found there, and only then go on to the next of their questions.\n").join("");
export const PROMPTS = [
  "Please do 8 steps with the tools, one after another, then report.",
  "Thank you. Now do 4 more steps, then report again.",
  "This is remark 7: just note it.",
];
const WANTED = ["All 8 steps are done", "All 4 steps are done", "Noted 7"];
export const getWeather = ({city, unit}) => `${city}: 22 degrees ${unit ?? "celsius"}, light wind, no rain before the evening.`;
export const add = ({a, b, note}) => `${a} + ${b} = ${a + b} (note: ${note ?? ""})`;
export function finish(answers) {
  const bad = WANTED.flatMap((w, i) => (answers[i] ?? "").includes(w) ? [] : [`${w} not in ${JSON.stringify(answers[i])}`]);
  console.log(bad.join("\n") || "OK");
  process.exit(bad.length ? 1 : 0);
}
