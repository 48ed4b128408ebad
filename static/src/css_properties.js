// Data for bars: `data-css="w:10;m:24"` becomes the custom properties --w and --m, which a strict CSP keeps out of markup.
export function applyProperties(root) {
  const found = root.querySelectorAll("[data-css]");
  for (const element of root.matches?.("[data-css]") ? [root, ...found] : found) {
    for (const pair of element.dataset.css.split(";")) {
      const [name, value] = pair.split(":");
      if (value !== undefined) element.style.setProperty(`--${name.trim()}`, value.trim());
    }
  }
}
