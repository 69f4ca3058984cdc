// The last lines of the log, by level and request.

import { byId, clock, el } from "./dom.js";
import { get } from "./api.js";

const MAX_LINES = 500;

export function logs() {
  let lines = [], last = 0, paused = false;
  const body = byId("logs-body"), button = byId("logs-pause");
  const wanted = { WARNING: ["WARNING", "ERROR", "CRITICAL"], ERROR: ["ERROR", "CRITICAL"] };

  function show() {
    const level = byId("logs-level").value, request = byId("logs-request").value.trim();
    const found = lines.filter((l) => (!level || wanted[level].includes(l.level)) && (!request || l.request.includes(request)));
    const atEnd = body.scrollTop + body.clientHeight >= body.scrollHeight - 8;
    body.textContent = found.map((l) => `${clock(l.at)} ${l.level} [${l.request}] ${l.text}`).join("\n");
    if (atEnd) body.scrollTop = body.scrollHeight;
  }

  button.addEventListener("click", () => {
    paused = !paused;
    button.setAttribute("aria-pressed", String(paused));
  });
  byId("logs-level").addEventListener("change", show);
  byId("logs-request").addEventListener("input", show);
  return async () => {
    if (paused) return;
    const found = (await get(`/admin/logs?after=${last}`)).lines;
    if (!found.length) return;
    last = found.at(-1).n;
    lines = [...lines, ...found].slice(-MAX_LINES);
    show();
  };
}
