// Ctrl-K: go to a page, a job, a node or help by name, or act. Pages come from the side bar, the rest from the server.
import { translated } from "./translations.js";

let chosen = 0;
let asked = 0;
let timer = 0;

const dialog = () => document.getElementById("palette");
const items = () => [...dialog().querySelectorAll("[role=option]:not([hidden])")];

function pages() {
  return [...document.querySelectorAll(".fw-side nav a")].map((link) => ({
    name: link.querySelector("[data-name]").textContent, url: link.href, key: link.dataset.key, kind: translated("page"),
  }));
}

// Actions of this page: they click the control that does the same.
const ACTIONS = [
  { name: translated("Change colours"), click: "[data-theme-switch]" },
  { name: translated("Explain this page, keyboard shortcuts"), click: "[data-shortcuts]" },
  { name: translated("Sign out"), click: ".fw-side form button" },
];

function run(row) {
  if (row.dataset.url) { location.assign(row.dataset.url); return; }
  dialog().close();
  document.querySelector(row.dataset.click)?.click();
}

function option(entry) {
  const row = document.createElement("li");
  row.setAttribute("role", "option");
  row.id = `palette-${Math.random().toString(36).slice(2)}`;
  if (entry.url) row.dataset.url = entry.url; else row.dataset.click = entry.click;
  const name = document.createElement("span");
  name.className = "fw-medium";
  name.textContent = entry.name;
  const more = document.createElement("span");
  more.className = "fw-cap fw-push";
  more.textContent = entry.note ?? (entry.key ? `g ${entry.key}` : entry.kind ?? translated("action"));
  row.append(name, more);
  return row;
}

function choose(index) {
  const all = items();
  chosen = all.length ? (index + all.length) % all.length : 0;
  all.forEach((row, i) => row.setAttribute("aria-selected", String(i === chosen)));
  const field = dialog().querySelector("input");
  if (all[chosen]) { field.setAttribute("aria-activedescendant", all[chosen].id); all[chosen].scrollIntoView({ block: "nearest" }); }
  else field.removeAttribute("aria-activedescendant");
}

async function search(words) {
  const list = dialog().querySelector("[role=listbox]");
  const mine = ++asked;
  const near = [...pages(), ...(words ? ACTIONS : [])].filter((page) => page.name.toLowerCase().includes(words.toLowerCase()));
  list.replaceChildren(...near.map(option));
  choose(0);
  if (words.length < 2) return;
  const answer = await fetch(`${dialog().dataset.search}?q=${encodeURIComponent(words)}`, { headers: { Accept: "application/json" } });
  if (!answer.ok || mine !== asked) return;
  const { found } = await answer.json();
  list.append(...found.map(option));
  choose(chosen);
  const status = dialog().querySelector("[role=status]");
  status.classList.toggle("fw-sr", items().length > 0);
  status.textContent = results(items().length);
}

function results(count) {
  if (count === 0) return translated("No results that you may see.");
  return count === 1 ? translated("1 result") : translated("{count} results", { count });
}

export function openPalette() {
  const box = dialog();
  if (!box || box.open) return;
  box.showModal();
  const field = box.querySelector("input");
  field.value = "";
  search("");
  field.focus();
}

export function startPalette() {
  const box = dialog();
  if (!box) return;
  document.addEventListener("click", (event) => { if (event.target.closest("[data-palette]")) openPalette(); });
  box.addEventListener("input", (event) => { clearTimeout(timer); timer = setTimeout(() => search(event.target.value.trim()), 120); });
  box.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); choose(chosen + (event.key === "ArrowDown" ? 1 : -1)); }
    if (event.key === "Escape") { event.preventDefault(); box.close(); } // a search field would only clear itself
    if (event.key === "Enter") { event.preventDefault(); const row = items()[chosen]; if (row) run(row); }
  });
  box.addEventListener("click", (event) => {
    if (event.target === box) box.close();
    const row = event.target.closest("[role=option]");
    if (row) run(row);
  });
}
