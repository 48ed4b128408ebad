// The button that goes light, dark, auto; it says which one holds now.
const ORDER = ["light", "dark", "auto"];
const WORDS = { light: "light", dark: "dark", auto: "as the system" };

function label() {
  const wish = document.documentElement.dataset.theme;
  for (const button of document.querySelectorAll("[data-theme-switch]")) {
    button.setAttribute("aria-label", `Colours: ${WORDS[wish]}. Change`);
    button.title = `Colours: ${WORDS[wish]}`;
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
