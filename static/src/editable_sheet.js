// The quota sheet: an edited number is marked at once, with the old one below it, and the rail counts the changes.
import { translated } from "./translations.js";

export function startSheet(root) {
  const sheet = root.matches?.("[data-quota-sheet]") ? root : root.querySelector("[data-quota-sheet]");
  if (!sheet) return;
  const count = sheet.querySelector("[data-quota-count]");
  const mark = (field) => {
    field.dataset.seen ??= field.defaultValue; // a line that was refused brings what its editor saw
    const dirty = field.value.trim() !== field.dataset.seen;
    field.toggleAttribute("data-dirty", dirty);
    let was = field.parentElement.querySelector(".fw-previous-value");
    if (dirty && !was) {
      was = document.createElement("span");
      was.className = "fw-previous-value";
      const old = document.createElement("s");
      old.textContent = field.dataset.seen;
      was.append(`${translated("was")} `, old);
      field.after(was);
    }
    if (!dirty && was) was.remove();
    const changes = sheet.querySelectorAll(".fw-edit[data-dirty]").length;
    if (count) count.textContent = changes === 0 ? translated("no changes") : changes === 1 ? translated("1 change") : translated("{changes} changes", { changes });
  };
  const leave = (event) => { if (sheet.querySelector(".fw-edit[data-dirty]")) event.preventDefault(); };
  window.addEventListener("beforeunload", leave);
  sheet.addEventListener("submit", () => window.removeEventListener("beforeunload", leave));
  sheet.addEventListener("click", (event) => { if (event.target.closest("[data-discard]")) window.removeEventListener("beforeunload", leave); });
  sheet.addEventListener("input", (event) => { if (event.target.matches(".fw-edit")) mark(event.target); });
  for (const field of sheet.querySelectorAll(".fw-edit")) { // edited before this script was loaded
    const seen = field.dataset.seen ?? field.defaultValue;
    if (seen !== undefined && field.value.trim() !== seen) mark(field);
  }
}
