// The keyboard: `/` and Ctrl-K open the palette, `g` and a letter go to a page, `?` lists the keys.
let g = 0;

function typing(target) {
  return target.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(target.tagName);
}

export function startKeys(openPalette) {
  document.addEventListener("keydown", (event) => {
    if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
      event.preventDefault();
      openPalette();
      return;
    }
    if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target) || document.querySelector("dialog[open]")) return;
    if (event.key === "/") {
      event.preventDefault();
      const field = document.querySelector("[data-page-search]");
      if (field) { field.focus(); field.select(); } else openPalette();
      return;
    }
    if (event.key === "g") { g = Date.now(); return; }
    if (Date.now() - g < 1500) {
      g = 0;
      const link = document.querySelector(`.fw-side [data-key="${CSS.escape(event.key)}"]`);
      if (link) { event.preventDefault(); link.click(); }
    }
  });
}
