// The button that switches between light, dark and auto, and shows the current one.
import { translated } from "./translations.js";

const ORDER = ["light", "dark", "auto"];

function word(theme) {
  if (theme === "light") return translated("light");
  return theme === "dark" ? translated("dark") : translated("system");
}

function label() {
  const theme = document.documentElement.dataset.theme;
  for (const button of document.querySelectorAll("[data-theme-switch]")) {
    button.setAttribute("aria-label", translated("Colours: {theme}. Change", { theme: word(theme) }));
    button.title = translated("Colours: {theme}", { theme: word(theme) });
  }
}

export function startThemeSwitch() {
  label();
  document.addEventListener("click", (event) => {
    if (!event.target.closest("[data-theme-switch]")) return;
    const next = ORDER[(ORDER.indexOf(document.documentElement.dataset.theme) + 1) % ORDER.length];
    try { localStorage.setItem("fairway-theme", next); } catch { return; }
    dispatchEvent(new Event("fairway-theme"));
    label();
    dispatchEvent(new Event("fairway-colours"));
  });
}
