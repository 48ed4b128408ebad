// Chooses light or dark before the first paint; "auto" follows the system.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    let theme = "auto";
    try { theme = localStorage.getItem("fairway-theme") || "auto"; } catch { /* storage may be disabled */ }
    const root = document.documentElement;
    root.dataset.theme = theme;
    root.dataset.bsTheme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
  };
  apply();
  dark.addEventListener("change", apply);
  addEventListener("fairway-theme", apply);
})();
