// The keyboard: `/` searches, Ctrl-K opens the palette, `g` and a letter go to a page, `?` explains the page and lists the keys.
import { translated } from "./translations.js";

let g = 0;

// The search of the page, if it has one that can be seen: it may be in a tab or a fold that is closed.
const pageSearch = () => [...document.querySelectorAll("[data-page-search]")].find((field) => field.checkVisibility());

function typing(target) {
  return target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
}

function row(keys, text) {
  const term = document.createElement("dt");
  for (const key of keys) {
    const cap = document.createElement("kbd");
    cap.textContent = key;
    term.append(cap, " ");
  }
  const what = document.createElement("dd");
  what.textContent = text;
  return [term, what];
}

function showShortcuts() {
  const dialog = document.getElementById("shortcuts");
  if (!dialog) return;
  const pages = [...document.querySelectorAll(".fw-side [data-key]")].flatMap((link) =>
    row(["g", link.dataset.key], link.querySelector("[data-name]").textContent));
  dialog.querySelector("[data-pages]").replaceChildren(...pages);
  dialog.querySelector("[data-slash]").textContent = pageSearch() ? translated("Search this page") : translated("Search or go to a page");
  dialog.showModal();
  explain(dialog.querySelector("[data-about]"));
}

// Explains the page with the first paragraph of its section in the documentation.
async function explain(box) {
  const [name, section = ""] = box.dataset.about.split("#");
  if (!name || !box.hidden) return;
  const answer = await fetch(`${box.dataset.sections}${name}/section/?section=${section}`, { headers: { Accept: "application/json" } });
  if (!answer.ok) return;
  const { title, summary, url } = await answer.json();
  box.querySelector("[data-about-title]").textContent = title;
  box.querySelector("[data-about-summary]").textContent = summary;
  box.querySelector("[data-about-link]").href = url;
  box.hidden = false;
}

export function startKeys(openPalette) {
  document.addEventListener("click", (event) => { if (event.target.closest("[data-shortcuts]")) showShortcuts(); });
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      event.preventDefault();
      openPalette();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || document.querySelector("dialog[open]")) return;
    if (event.key === "/") {
      event.preventDefault();
      const field = pageSearch();
      if (field) { field.focus(); field.select(); } else openPalette();
      return;
    }
    if (event.key === "?") { event.preventDefault(); showShortcuts(); return; }
    if (event.key === "g") { g = Date.now(); return; }
    if (Date.now() - g < 1500) {
      g = 0;
      const link = document.querySelector(`.fw-side [data-key="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); link.click(); }
    }
  });
}
