// Chooses light or dark before the first paint; "auto" follows the system.
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    let wish = "auto";
    try { wish = localStorage.getItem("fairway-theme") || "auto"; } catch { /* storage may be closed to us */ }
    const root = document.documentElement;
    root.dataset.theme = wish;
    root.dataset.bsTheme = wish === "auto" ? (dark.matches ? "dark" : "light") : wish;
  };
  apply();
  dark.addEventListener("change", apply);
  addEventListener("fairway-theme", apply);
})();
