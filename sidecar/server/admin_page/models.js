// Models: state, size, context, and the buttons that load, unload and pin.

import { badge, buttons, byId, bytes, count, el, seconds, table } from "./dom.js";
import { action, post } from "./api.js";

const TONES = { loaded: "good", loading: "warn", failed: "bad", broken: "bad", incomplete: "bad" };

const path = (model, what) => `/admin/models/${encodeURIComponent(model.id)}/${what}`;

function state(model) {
  const word = model.state === "loaded" && model.pinned ? "pinned" : model.state;
  const tone = TONES[model.state] || "quiet";
  const read = model.read_bytes ? `, ${bytes(model.read_bytes)} of ${bytes(model.size_bytes)}` : "";
  const step = model.step ? ` (${model.step}${read})` : "";
  if (!model.load_error) return badge(word + step, tone);
  return el("span", { "data-as": word + model.load_error }, badge(word, tone), el("div", { class: "bad" }, model.load_error));
}

function controls(model, refresh) {
  const act = (label, work, more = {}) => el("button", { type: "button", onclick: action(async () => {
    const text = await work();
    refresh();
    return text;
  }), "aria-label": `${label} ${model.id}`, ...more }, label);
  const list = [];
  if (model.state === "loaded") {
    list.push(act("Unload", async () => {
      const answer = await post(path(model, "unload"));
      return `${model.id} is unloaded; ${bytes(answer.freed_bytes)} came back.`;
    }));
  } else if (!["loading", "unloading", "broken", "incomplete", "unavailable"].includes(model.state)) {
    list.push(act("Load", async () => { await post(path(model, "load")); return `${model.id} is loaded.`; }));
  }
  list.push(act(model.pinned ? "Unpin" : "Pin", async () => {
    await post(path(model, "settings"), { pinned: !model.pinned });
    return model.pinned ? `${model.id} may leave now.` : `${model.id} stays loaded.`;
  }));
  list.push(act("Idle time", async () => {
    const text = prompt(`Idle seconds after which ${model.id} leaves; 0: never`, model.ttl_s ?? 0);
    if (text === null || text.trim() === "") return "";
    await post(path(model, "settings"), { ttl_seconds: Number(text) });
    return `${model.id} leaves after ${Number(text) || "no"} idle seconds.`;
  }));
  return buttons(`${model.state}|${model.pinned}|${model.ttl_s}`, ...list);
}

export function models(refresh) {
  const show = table(byId("models-body"), "What requests may name", [
    { head: "Model", cell: (m) => m.id },
    { head: "State", cell: state },
    { head: "Kind", cell: (m) => m.kind + (m.takes_images ? ", sees" : "") },
    { head: "Size", number: true, cell: (m) => `${bytes(m.actual_bytes ?? m.size_bytes)}${m.actual_bytes ? "" : " estimated"}` },
    { head: "Context", number: true, cell: (m) => count(m.max_input_tokens) },
    { head: "Load", number: true, cell: (m) => (m.estimated_load_s === null ? "" : `about ${seconds(m.estimated_load_s)}`) },
    { head: "Idle", number: true, cell: (m) => (m.state === "loaded" ? seconds(m.idle_s) : "") },
    { head: "Leaves after", number: true, cell: (m) => (m.ttl_s ? seconds(m.ttl_s) : "") },
    { head: "Do", cell: (m) => controls(m, refresh) },
  ], (m) => m.id, "No model is here.");
  byId("rescan").addEventListener("click", action(async () => {
    const found = await post("/admin/models/rescan");
    refresh();
    return `${found.models.length} models.`;
  }));
  return (now) => show(now.models);
}
