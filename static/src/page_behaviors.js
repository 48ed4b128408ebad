// Small habits of pages: tabs, copy buttons, fields that submit their form, rows that can be selected together.
import { translated } from "./translations.js";

document.querySelector(".fw-nav [aria-current]")?.scrollIntoView({ block: "nearest" }); // the side bar may scroll

export function startTabs() {
  document.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) show(tab);
  });
  document.addEventListener("keydown", (event) => {
    const tab = event.target.closest?.("[role=tab]");
    if (!tab || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
    const all = [...tab.closest("[role=tablist]").querySelectorAll("[role=tab]")];
    const at = all.indexOf(tab);
    const to = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[event.key];
    event.preventDefault();
    const next = all[(to + all.length) % all.length];
    show(next);
    next.focus();
  });
}

document.addEventListener("htmx:load", () => { // fresh panes come as the server drew them
  for (const tab of document.querySelectorAll("[role=tab][aria-selected=true][aria-controls]")) show(tab);
});

function show(tab) {
  for (const other of tab.closest("[role=tablist]").querySelectorAll("[role=tab]")) {
    const on = other === tab;
    other.setAttribute("aria-selected", String(on));
    other.tabIndex = on ? 0 : -1;
    const pane = document.getElementById(other.getAttribute("aria-controls"));
    if (pane) pane.hidden = !on;
  }
}

export function startCopy() {
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const from = document.querySelector(button.dataset.copy);
    await navigator.clipboard.writeText((from.value ?? from.textContent).trim());
    const before = button.textContent;
    button.dataset.done = "";
    if (before.trim()) { button.textContent = translated("Copied"); setTimeout(() => { button.textContent = before; }, 1500); }
  });
}

export function startRunLinks() { // MLflow's client names the run in the fragment, which the server does not see
  const list = document.querySelector("[data-run-links]");
  const found = /^#\/experiments\/[\w-]+\/runs\/([\w-]+)/.exec(location.hash);
  if (list && found) location.replace(`${list.dataset.runLinks}${found[1]}/`);
}

export function startAutoSubmit() {
  document.addEventListener("change", (event) => {
    if (event.target.closest("[data-submit-on-change]")) event.target.form?.requestSubmit();
  });
}

export function startBulk() { // the bar with the common act appears with the first chosen row
  const refresh = () => {
    for (const bar of document.querySelectorAll("[data-bulk-bar]")) {
      const chosen = document.querySelectorAll("[data-bulk]:checked").length;
      bar.hidden = chosen === 0;
      const word = bar.querySelector("[data-bulk-count]");
      if (word) word.textContent = chosen === 1 ? "1 job" : `${chosen} jobs`;
    }
  };
  document.addEventListener("change", (event) => {
    if (event.target.matches("[data-bulk-all]")) {
      for (const box of document.querySelectorAll("[data-bulk]")) box.checked = event.target.checked;
    }
    if (event.target.matches("[data-bulk-all], [data-bulk]")) refresh();
  });
  document.addEventListener("htmx:afterSwap", refresh);
  refresh(); // rows that were chosen before this script was loaded
  document.addEventListener("htmx:beforeSwap", ({ detail }) => { // a live change that was under way when a row was chosen
    if (detail.requestConfig.elt.matches?.("[data-live]") && detail.target.querySelector("[data-bulk]:checked")) detail.shouldSwap = false;
  });
  document.addEventListener("submit", ({ target }) => { // filters change the address without a new page
    if (target.matches("[data-query-of-page]")) target.elements.query.value = location.search;
    if (target.id === "bulk") target.elements.back.value = location.pathname + location.search;
  });
}

export function startChosenRows() { // a form that sends the rows chosen in another one
  document.addEventListener("formdata", ({ target, formData }) => {
    const name = target.dataset.chosen;
    if (name) for (const box of document.querySelectorAll(`[name="${name}"]:checked`)) formData.append(name, box.value);
  });
}

export function keepFocus() { // a fragment that is fetched anew must not throw the keyboard back to the top
  let mark = null;
  document.addEventListener("htmx:beforeSwap", (event) => {
    const held = document.activeElement;
    if (!held || held === document.body || !event.detail.target?.contains(held) || held.id) { mark = null; return; }
    const same = (element) => element.tagName === held.tagName && element.getAttribute("href") === held.getAttribute("href")
      && element.getAttribute("aria-label") === held.getAttribute("aria-label") && element.textContent === held.textContent;
    mark = { same, target: event.detail.target };
  });
  document.addEventListener("htmx:afterSettle", () => {
    if (!mark) return;
    [...mark.target.querySelectorAll("a, button, input, select")].find(mark.same)?.focus({ preventScroll: true });
    mark = null;
  });
}

export function keepScrollAndOpenState() { // nor close what was opened, nor scroll back what was scrolled; both need an id
  let open = [];
  let scrolled = [];
  document.addEventListener("htmx:beforeSwap", (event) => {
    const target = event.detail.target;
    open = [...(target?.querySelectorAll("details[open][id]") ?? [])].map((one) => one.id);
    scrolled = [...(target?.querySelectorAll("[data-keep-scroll][id]") ?? [])].map((one) => [one.id, one.scrollLeft, one.scrollTop]);
  });
  document.addEventListener("htmx:afterSwap", () => {
    for (const id of open) document.getElementById(id)?.setAttribute("open", "");
    for (const [id, left, top] of scrolled) document.getElementById(id)?.scrollTo(left, top);
    open = scrolled = [];
  });
}

// Filters of a list stand in the address. htmx's own history is off: it would keep copies of pages in the browser.
export function keepFiltersInAddress() {
  let shown = location.search;
  document.addEventListener("htmx:afterRequest", ({ detail }) => {
    if (!detail.successful || !detail.elt.matches("form[data-filters]")) return;
    const url = new URL(location.pathname, location.href);
    for (const [name, value] of new FormData(detail.elt)) if (value) url.searchParams.append(name, value);
    if (url.search === location.search) return;
    const typed = detail.requestConfig.triggeringEvent?.type === "input"; // one entry for a word, not for each letter
    if (typed && history.state?.typed) history.replaceState({ typed }, "", url); else history.pushState({ typed }, "", url);
    shown = url.search;
  });
  addEventListener("popstate", () => { if (location.search !== shown) location.reload(); });
}

// A button with data-open shows the dialog of that id; its backdrop closes it, as Escape does.
export function startDialogs() {
  document.addEventListener("click", (event) => {
    const opener = event.target.closest("[data-open]");
    if (opener) document.getElementById(opener.dataset.open).showModal();
    if (event.target.matches("dialog.fw-sheet")) event.target.close();
  });
}
