// Looks at the server each second while the page is seen, and has each panel show it.

import { byId, clock, el } from "./dom.js";
import { forgetKey, get, takeCode } from "./api.js";
import { models } from "./models.js";
import { memory } from "./memory.js";
import { requests } from "./requests.js";
import { why } from "./why.js";
import { cache } from "./cache.js";
import { savings } from "./savings.js";
import { clients } from "./clients.js";
import { settings } from "./settings.js";
import { logs } from "./logs.js";

const EVERY_MS = 1000, STALE_MS = 5000;
let seenAt = 0, shown = "", started = 0;

function theme() {
  const button = byId("theme"), root = document.documentElement;
  const isDark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  const kept = localStorage.getItem("litellm-mlx-theme");
  if (kept) root.dataset.theme = kept;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem("litellm-mlx-theme", root.dataset.theme);
    name();
  });
  name();
}

function status(now) {
  const parts = [`${now.status}${now.reason ? `: ${now.reason}` : ""}`, `version ${now.version}`, `since ${clock(now.started_at)}`];
  if (now.failed_tests.length) parts.push(`self-test failed: ${now.failed_tests.join(", ")}`);
  if (now.download) parts.push(`download ${Math.round((100 * now.download.done_bytes) / Math.max(1, now.download.total_bytes))} %`);
  const text = parts.join(", ");
  if (text !== shown) byId("status").textContent = shown = text;
}

function age() {
  const isStale = Date.now() - seenAt > STALE_MS;
  document.body.classList.toggle("stale", isStale);
  const place = byId("stale");
  place.hidden = !isStale;
  if (isStale) place.textContent = seenAt ? `no answer since ${clock(seenAt / 1000)}` : "no answer yet";
}

async function main() {
  theme();
  byId("logout").addEventListener("click", forgetKey);
  await takeCode();
  let timer = 0, isLooking = false;
  const panels = [];

  async function look() {
    clearTimeout(timer);
    if (isLooking) return;
    isLooking = true;
    try {
      const now = await get("/admin/state");
      if (started && now.started_at !== started) { location.reload(); return; }
      started = now.started_at;
      seenAt = Date.now();
      status(now);
      for (const panel of panels) await panel(now);
    } catch (error) {
      if (error.status) byId("status").textContent = shown = error.message;
    } finally {
      isLooking = false;
      age();
      if (!document.hidden) timer = setTimeout(look, EVERY_MS);
    }
  }

  panels.push(models(look), memory(look), requests(look), why(), cache(look), savings(), clients(), settings(), logs());
  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  look();
}

main();
