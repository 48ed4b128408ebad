// The button that switches between light, dark and auto, and shows the current one.
const ORDER = ["light", "dark", "auto"];
const WORDS = { light: "light", dark: "dark", auto: "system" };

function label() {
  const theme = document.documentElement.dataset.theme;
  for (const button of document.querySelectorAll("[data-theme-switch]")) {
    button.setAttribute("aria-label", `Colours: ${WORDS[theme]}. Change`);
    button.title = `Colours: ${WORDS[theme]}`;
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
