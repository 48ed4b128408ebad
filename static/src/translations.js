// Texts of scripts in the language of the page: the catalogue of Django, which pages in English do not load.

/** Return the text in the language of the page; `{name}` is replaced by the value of that name. */
export function translated(text, values = {}) {
  const found = window.gettext?.(text) ?? text;
  return found.replaceAll(/\{(\w+)\}/g, (mark, name) => (name in values ? values[name] : mark));
}
