// Stop buttons ask for no confirmation: the form is posted after a few seconds in which it can be undone.
// Leaving the page posts it at once; without scripts the form is posted directly.
import { translated } from "./translations.js";

const WAIT_S = 5;

function note(form, action) {
  const place = document.getElementById("notes");
  const row = document.createElement("div");
  row.className = "fw-note";
  row.dataset.s = "waiting";
  row.setAttribute("role", "status");
  const text = document.createElement("span");
  const back = document.createElement("button");
  back.type = "button";
  back.className = "fw-link fw-push";
  back.textContent = translated("Undo");
  row.append(text, back);
  place.append(row);
  return { row, text, back, action };
}

function send(action, body) {
  const form = document.createElement("form");
  form.method = "post";
  form.action = action;
  for (const [name, value] of body) {
    const field = document.createElement("input");
    field.type = "hidden";
    field.name = name;
    field.value = value;
    form.append(field);
  }
  document.body.append(form);
  form.submit();
}

export function startUndo() {
  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (!form.matches("form[data-undo]") || event.submitter?.hasAttribute("formaction")) return;
    event.preventDefault();
    const body = new FormData(form, event.submitter);
    const { row, text, back, action } = note(form, form.dataset.undo);
    const buttons = form.querySelectorAll("button");
    buttons.forEach((button) => { button.disabled = true; });
    let left = WAIT_S;
    const show = () => { text.textContent = `${action} in ${left}\u00a0s.`; };
    show();
    const leave = () => { end(); fetch(form.action, { method: "POST", body, keepalive: true, redirect: "manual" }); };
    const tick = setInterval(() => { left -= 1; if (left > 0) show(); else go(); }, 1000);
    const end = () => { clearInterval(tick); removeEventListener("pagehide", leave); row.remove(); };
    const go = () => {
      end();
      send(form.action, body); // the form itself may have been replaced in the meantime
    };
    addEventListener("pagehide", leave, { once: true });
    back.addEventListener("click", () => { end(); buttons.forEach((button) => { button.disabled = false; }); });
    back.focus();
  });
}
