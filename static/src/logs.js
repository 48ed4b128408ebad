// Follows logs by cursor: fetches what follows the last line, on each message of the socket and every few seconds.
import { subscribe } from "./live.js";
import { clock } from "./relative_times.js";
import { translated } from "./translations.js";

const EVERY_MS = 2000;
const REST_EVERY_MS = 10000;
const KEPT = 5000; // lines in the page; the rest is in the download
const WARNING = /\b(warn(ing)?|deprecat)/i;
const ERROR = /\b(error|exception|traceback|fatal|failed|out of memory|killed)\b/i;

export function followLogs(root) {
  for (const box of root.querySelectorAll("[data-log]")) follow(box);
}

function follow(box) {
  if (box.dataset.started) return;
  box.dataset.started = "1";
  const list = box.querySelector("[data-log-lines]");
  const foot = box.querySelector("[data-log-foot]");
  const filter = box.querySelector("[data-log-filter]");
  const choice = box.querySelector("[data-log-rank]");
  const button = box.querySelector("[data-log-follow]");
  const stream = box.querySelector("[data-log-stream]");
  const save = box.querySelector("[data-log-download]");
  const all = list.dataset.ranks.split(",").filter(Boolean);
  const many = all.length > 1;
  const state = new Map(); // rank -> {cursor, complete}
  let busy = false;
  let jumped = false;
  let dropped = 0;
  let version = 0; // counts changes of the chosen ranks or position

  const following = () => button?.getAttribute("aria-pressed") === "true";
  const labels = new Map(list.dataset.labels.split(",").map((label, i) => [all[i], label]));
  const ranks = () => { const some = choice?.value || (many ? "" : box.dataset.rank || all[0]); return some ? some.split(",") : all; };

  // Text, or /pattern/. An invalid pattern hides nothing and is reported below the log.
  let fault = "";
  let test = () => true;
  function readFilter() {
    const words = filter?.value.trim() ?? "";
    const pattern = words.match(/^\/(.+)\/$/);
    fault = "";
    test = (text) => text.toLowerCase().includes(words.toLowerCase());
    if (!pattern) return;
    try {
      const found = new RegExp(pattern[1], "i");
      test = (text) => found.test(text);
    } catch (problem) {
      fault = translated("The pattern is not a regular expression ({problem})", { problem: problem.message.split(": ").pop() });
      test = () => true;
    }
  }

  function row(rank, [at, text, isError]) {
    const line = document.createElement("li");
    const time = document.createElement("time");
    if (at) { time.dateTime = at; time.textContent = clock(at, true); time.title = at; }
    const who = document.createElement("b");
    who.textContent = many ? labels.get(String(rank)) : isError ? "err" : "";
    const words = document.createElement("span");
    words.textContent = text;
    if (ERROR.test(text)) line.dataset.l = "e"; else if (WARNING.test(text)) line.dataset.l = "w";
    if (!at && !who.textContent) line.className = "fw-log__plain"; // nothing to put into the columns
    line.append(time, who, words);
    line.dataset.rank = rank;
    line.dataset.stream = isError ? "stderr" : at ? "stdout" : ""; // without a time the streams cannot be told apart
    line.hidden = !isShown(line);
    return line;
  }
  // the present text of a line that the program has not ended, such as a progress bar; the next answer replaces it
  function unfinishedRow(rank, line) {
    const shown = row(rank, line);
    shown.dataset.unfinished = "";
    return shown;
  }
  const isShown = (line) => (!stream?.value || ["", stream.value].includes(line.dataset.stream)) && test(line.children[2].textContent);

  async function fetchRank(rank) {
    const known = state.get(rank) ?? { cursor: null, complete: false };
    const url = new URL(box.dataset.lines, location.href);
    url.searchParams.set("rank", rank);
    url.searchParams.set("attempt", box.dataset.attempt);
    if (known.cursor !== null) url.searchParams.set("cursor", known.cursor);
    const answer = await fetch(url, { headers: { Accept: "application/json" } });
    if (!answer.ok) throw new Error(String(answer.status));
    const data = await answer.json();
    const read = { cursor: data.cursor, complete: data.complete, lost: data.lost, since: data.since, removed: data.removed, beyond: data.dropped };
    return { rank, read, skipped: known.cursor === null ? data.from : 0, lines: data.lines, unfinished: data.unfinished, more: known.cursor !== null && data.cursor < data.size && data.cursor > known.cursor };
  }

  async function look() {
    if (busy || document.visibilityState !== "visible") return;
    busy = true;
    const asked = version;
    try {
      let again = false;
      const open = ranks().filter((rank) => !state.get(rank)?.complete).slice(0, 16);
      const came = await Promise.all(open.map(fetchRank));
      if (asked !== version) return; // other ranks were chosen meanwhile
      for (const { rank, read, skipped } of came) { state.set(rank, read); dropped += skipped; }
      const fresh = came.flatMap(({ rank, lines }) => lines.map((line) => [rank, line]));
      if (came.length > 1) fresh.sort((a, b) => (a[1][0] < b[1][0] ? -1 : a[1][0] > b[1][0] ? 1 : 0));
      const now = came.flatMap(({ rank, unfinished }) => unfinished.map((line) => [rank, line]));
      const stay = jumped;
      const bottom = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      const answered = new Set(came.map(({ rank }) => String(rank)));
      for (const line of list.querySelectorAll("[data-unfinished]")) if (answered.has(line.dataset.rank)) line.remove();
      const others = list.querySelector("[data-unfinished]");
      for (const [rank, line] of fresh) list.insertBefore(row(rank, line), others);
      for (const [rank, line] of now) list.append(unfinishedRow(rank, line));
      while (list.childElementCount > KEPT) list.firstElementChild.remove();
      if (stay) { list.scrollTop = 0; jumped = false; } else if (fresh.length + now.length && (following() || bottom || !box.hasAttribute("data-growing"))) list.scrollTop = list.scrollHeight;
      again = came.some(({ more }) => more);
      tell();
      if (again) setTimeout(look, 50);
    } catch (problem) {
      foot.textContent = translated("The log could not be read; retrying.");
      if (!(problem instanceof TypeError) && !(problem instanceof Error)) throw problem;
    } finally {
      busy = false;
      if (asked !== version) look();
    }
  }

  function tell() {
    const rows = list.querySelectorAll("li");
    const shown = list.querySelectorAll("li:not([hidden])").length;
    const done = ranks().every((rank) => state.get(rank)?.complete);
    const parts = [];
    if (fault) parts.push(fault);
    if (rows.length === 0) parts.push(box.hasAttribute("data-growing") ? translated("No line yet.") : translated("The log is empty."));
    else {
      const count = rows.length.toLocaleString("en");
      if (shown < rows.length) parts.push(translated("{shown} of {count} lines match", { shown: shown.toLocaleString("en"), count }));
      else parts.push(rows.length === 1 ? translated("1 line") : translated("{count} lines", { count }));
    }
    const known = ranks().map((rank) => state.get(rank)).filter(Boolean);
    if (known.some(({ removed }) => removed)) parts.splice(0, 1, translated("This log was removed after the retention period"));
    const beyond = known.reduce((sum, { beyond: bytes }) => sum + (bytes || 0), 0);
    if (beyond > 0) parts.push(translated("{beyond} bytes beyond the size limit of a log", { beyond: beyond.toLocaleString("en") }));
    if (dropped > 0) parts.push(translated("earlier lines are in the download"));
    if (done && rows.length) parts.push(translated("the log is complete"));
    const lost = new Map(ranks().map((rank) => state.get(rank)).filter((known) => known?.lost).map((known) => [known.lost, known.since]));
    const words = [...lost].map(([message, since]) => (since ? translated("{message} Since {time}.", { message, time: clock(since) }) : message));
    foot.textContent = [words.length ? `${parts.join(", ")}.` : parts.join(", "), ...words].join(" ");
    foot.classList.toggle("fw-warn-t", words.length > 0);
  }

  const refilter = () => {
    readFilter();
    for (const line of list.children) line.hidden = !isShown(line);
    tell();
  };
  filter?.addEventListener("input", refilter);
  stream?.addEventListener("change", refilter);
  choice?.addEventListener("change", () => {
    list.replaceChildren(); state.clear(); dropped = 0; version += 1;
    if (save) { const url = new URL(save.href); url.searchParams.set("rank", ranks().join(",")); save.href = url; }
    look();
  });
  // continue from the found line, for its rank only
  const goTo = (rank, cursor) => {
    if (choice) choice.value = rank;
    list.replaceChildren(); state.clear(); dropped = cursor; version += 1;
    state.set(String(rank), { cursor, complete: false });
    button?.setAttribute("aria-pressed", "false");
    jumped = true;
    look();
  };
  if (box.querySelector("[data-log-search]")) import("./log_search.js").then(({ startSearch }) => startSearch(box, { filter, stream, labels, rank: () => choice?.value ?? "", goTo }));
  button?.addEventListener("click", () => {
    const on = !following();
    button.setAttribute("aria-pressed", String(on));
    if (on) list.scrollTop = list.scrollHeight;
  });
  look();
  const growing = box.hasAttribute("data-growing");
  if (growing) for (const rank of all.slice(0, 16)) subscribe(`${box.dataset.topic}.${rank}`, look);
  // after the job's end too: the rest of its log may be on a node that does not answer; complete logs are not fetched
  const timer = setInterval(() => { if (!box.isConnected) clearInterval(timer); else look(); }, growing ? EVERY_MS : REST_EVERY_MS);
}
