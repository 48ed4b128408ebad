// Searches the complete log of all ranks on the server, and steps from match to match. The query is the filter's: text, or /pattern/.
import { clock } from "./relative_times.js";
import { translated } from "./translations.js";

const SHOWN_AT_MOST = 1000;

export function startSearch(box, { filter, stream, labels, rank, goTo }) {
  const panel = box.querySelector("[data-log-found]");
  const list = box.querySelector("[data-log-matches]");
  const told = box.querySelector("[data-log-status]");
  const attempt = box.dataset.attempt;
  let next = "";
  let gaps = new Set(); // what the server could not search
  let asked = 0;

  function row([of, cursor, at, text, isError]) {
    const line = document.createElement("li");
    const time = document.createElement("time");
    if (at) { time.dateTime = at; time.textContent = clock(at, true); }
    const who = document.createElement("b");
    who.textContent = `${labels.get(String(of)) ?? of}${isError ? " err" : ""}`;
    const words = document.createElement("span");
    words.textContent = text;
    line.append(time, who, words);
    line.dataset.rank = of;
    line.dataset.cursor = cursor;
    return line;
  }

  const say = () => {
    const count = list.childElementCount;
    const place = [...list.children].findIndex((line) => line.hasAttribute("aria-current"));
    const shown = count.toLocaleString("en");
    const some = next ? translated("{shown} or more lines match.", { shown }) : count === 1 ? translated("1 line matches.") : translated("{shown} lines match.", { shown });
    const shownPlace = place < 0 ? some : translated("{place} of {some}", { place: place + 1, some });
    told.textContent = [shownPlace, ...gaps].join(" ");
  };

  async function more() {
    const mine = asked;
    const words = filter.value.trim();
    const pattern = words.match(/^\/(.+)\/$/);
    const url = new URL(box.dataset.search, location.href);
    url.search = new URLSearchParams({ q: pattern ? pattern[1] : words, regex: pattern ? "1" : "", stream: stream?.value ?? "", rank: rank(), attempt, after: next });
    const answer = await fetch(url, { headers: { Accept: "application/json" } });
    const data = await answer.json();
    if (mine !== asked) return false;
    if (data.refusal) { next = ""; told.textContent = data.refusal; return false; }
    list.append(...data.matches.map(row));
    next = data.next;
    for (const gap of data.gaps) gaps.add(gap);
    return true;
  }

  async function search() {
    asked += 1;
    const mine = asked;
    next = "";
    gaps = new Set();
    list.replaceChildren();
    panel.hidden = false;
    if (!filter.value.trim()) { told.textContent = translated("Enter a search term first."); filter.focus(); return; }
    told.textContent = translated("Searching …");
    try {
      do if (!(await more())) return; while (next && list.childElementCount === 0 && mine === asked);
      say();
    } catch { told.textContent = translated("The log could not be searched. Try again."); }
  }

  async function step(by) {
    const lines = [...list.children];
    const at = lines.findIndex((line) => line.hasAttribute("aria-current"));
    const wanted = at < 0 ? (by > 0 ? 0 : lines.length - 1) : at + by;
    if (wanted >= lines.length && next && lines.length < SHOWN_AT_MOST && !(await more())) return;
    choose(list.children[wanted]);
  }

  function choose(line) {
    if (!line) { say(); return; }
    list.querySelector("[aria-current]")?.removeAttribute("aria-current");
    line.setAttribute("aria-current", "true");
    line.scrollIntoView({ block: "nearest" });
    say();
    goTo(line.dataset.rank, Number(line.dataset.cursor));
  }

  box.querySelector("[data-log-search]").addEventListener("click", search);
  filter.addEventListener("keydown", (event) => { if (event.key === "Enter") search(); });
  for (const button of box.querySelectorAll("[data-log-step]")) button.addEventListener("click", () => step(Number(button.dataset.logStep)));
  box.querySelector("[data-log-close]").addEventListener("click", () => { asked += 1; panel.hidden = true; });
  list.addEventListener("click", (event) => choose(event.target.closest("li")));
}
