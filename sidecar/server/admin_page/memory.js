// Memory: one bar up to the limit, and the same as a list of numbers.

import { byId, bytes, el, svg } from "./dom.js";
import { action, post } from "./api.js";

export function memory(refresh) {
  const holder = byId("memory-body");
  byId("clear-memory").addEventListener("click", action(async () => {
    await post("/admin/memory/clear");
    refresh();
    return "What MLX kept of freed memory was given back.";
  }));
  return (now) => {
    const m = now.memory;
    const running = Math.max(0, m.active - m.weights - m.stored_kv);
    const free = Math.max(0, m.limit - Math.max(m.active, m.weights + m.stored_kv));
    const parts = [
      ["weights", m.weights, "var(--weights)"],
      ["KV kept for reuse", m.stored_kv, "var(--kv)"],
      ["running requests and the rest", running, "var(--running)"],
      ["free below the limit", free, "var(--back)"],
    ];
    const total = Math.max(m.limit, parts.reduce((sum, p) => sum + p[1], 0), 1);
    const drawing = svg("svg", { class: "bar", role: "img", viewBox: "0 0 1000 20", preserveAspectRatio: "none" });
    drawing.append(svg("title", {}, `${bytes(m.active)} of ${bytes(m.limit)} in use`));
    let at = 0;
    for (const [, size, colour] of parts) {
      const width = (1000 * size) / total;
      drawing.append(svg("rect", { x: at, y: 0, width, height: 20, fill: colour }));
      at += width;
    }
    const list = el("ul", { class: "parts" }, ...parts.map(([name, size, colour]) => el("li", {},
      svg("svg", { viewBox: "0 0 10 10", "aria-hidden": "true" }, svg("rect", { width: 10, height: 10, fill: colour, stroke: "currentColor" })),
      `${name}: ${bytes(size)}`)));
    list.append(el("li", {}, `in use: ${bytes(m.active)}, most so far: ${bytes(m.peak)}`));
    list.append(el("li", {}, `limit: ${bytes(m.limit)} (MAX_PROCESS_MEMORY)`));
    holder.replaceChildren(drawing, list);
  };
}
