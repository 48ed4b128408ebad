// Updates relative times while a page is open; the exact time is in the title.
import { translated } from "./translations.js";

const UNITS = [[86400, "d"], [3600, "h"], [60, "min"]];

// Countdowns count against the server's clock: a browser may be minutes off. Smaller differences are latency.
const NOTICED_MS = 5000;
const OFF_MS = Number(document.body?.dataset.renderedAt || Date.now()) - Date.now();
const SKEW_MS = Math.abs(OFF_MS) > NOTICED_MS ? OFF_MS : 0;

export function clock(at, seconds = false) { // in the zone of the person, not of the browser
  const when = new Date(at);
  if (Number.isNaN(when.getTime())) return "";
  const parts = { hour: "2-digit", minute: "2-digit", ...(seconds ? { second: "2-digit" } : {}) };
  return when.toLocaleTimeString("en-GB", { ...parts, timeZone: document.body.dataset.zone || undefined });
}

export function spoken(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole}\u00a0s`;
  const [size, unit] = UNITS.find(([span]) => whole >= span);
  const at = UNITS.findIndex(([span]) => span === size);
  const more = UNITS[at + 1];
  const rest = more ? Math.floor((whole % size) / more[0]) : 0;
  const head = `${Math.floor(whole / size)}\u00a0${unit}`;
  return rest ? `${head} ${String(rest).padStart(unit === "h" ? 2 : 1, "0")}\u00a0${more[1]}` : head;
}

function refresh() {
  const now = (Date.now() + SKEW_MS) / 1000;
  for (const time of document.querySelectorAll("time[data-ago], time[data-left], time[data-since]")) {
    const at = Date.parse(time.dateTime) / 1000;
    if (Number.isNaN(at)) continue;
    if ("ago" in time.dataset) time.textContent = now - at < 5 ? translated("just now") : translated("{time} ago", { time: spoken(now - at) });
    else if ("since" in time.dataset) time.textContent = spoken(now - at);
    else time.textContent = at > now ? translated("{time} left", { time: spoken(at - now) }) : translated("time is up");
  }
}

export function startTimes() {
  refresh();
  setInterval(refresh, 1000 * 5);
}
