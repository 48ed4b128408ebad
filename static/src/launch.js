// The launch form: requests a preview shortly after each keystroke, and applies suggestions.
import { startAmounts } from "./amounts.js";
import { editedFields, markSent, restoreDraft, saveDraft } from "./drafts.js";
import { translated } from "./translations.js";

const DELAY_MS = 220;
const RETRY_MS = 5000;
const MAX_CLICK_PX = 5; // a pointer that moves further while a button is pressed leaves it

export function startLaunch(root) {
  const form = root.querySelector("[data-launch]");
  if (!form || form.dataset.started) return;
  form.dataset.started = "1";
  let timer = 0;
  let isCurrent = false; // the preview shows the form as it is
  let launchPressed = false; // before the preview was current
  const rail = document.getElementById("rail");
  const askNow = () => { timer = 0; window.htmx.trigger(rail, "check"); };
  const ask = (delay = DELAY_MS) => {
    clearTimeout(timer);
    isCurrent = launchPressed = false;
    timer = setTimeout(askNow, delay);
  };

  const shape = () => {
    const kind = form.elements.kind.value;
    form.dataset.kind = kind;
    for (const part of form.querySelectorAll("[data-only-for]")) part.hidden = part.dataset.onlyFor !== kind;
    for (const part of document.querySelectorAll("[data-not-for]")) part.hidden = (part.dataset.notFor || "").split(" ").includes(kind);
    for (const part of form.querySelectorAll("[data-launcher]")) part.hidden = part.dataset.launcher !== form.elements.launcher.value;
    const project = form.elements.project.value;
    for (const part of form.querySelectorAll("[data-projects]")) {
      part.hidden = (part.dataset.notFor || "").split(" ").includes(kind) || !part.dataset.projects.split(" ").includes(project);
    }
    const one = form.querySelector("[data-one-gpu]");
    if (one) one.hidden = Number(form.elements.gpus_per_task.value) !== 1;
    const chosen = form.querySelector("[name=environment]:checked");
    if (chosen?.closest("label").hidden) {
      const other = [...form.querySelectorAll("[name=environment]")].find((radio) => !radio.closest("label").hidden);
      if (other) other.checked = true;
    }
  };

  const roles = form.querySelector("[data-roles]");
  const count = form.elements["roles-TOTAL_FORMS"];
  const addRole = () => {
    const blank = form.querySelector("[data-role-template]").innerHTML.replaceAll("__prefix__", count.value);
    roles.insertAdjacentHTML("beforeend", blank);
    count.value = Number(count.value) + 1;
    return roles.lastElementChild.querySelector("input");
  };
  form.addEventListener("click", (event) => {
    if (event.target.closest("[data-role-add]")) addRole().focus();
    const role = event.target.closest("[data-role-remove]")?.closest("[data-role]");
    if (!role) return;
    role.querySelector("[name$=-DELETE]").checked = true; // numbers of the others stay
    role.hidden = true;
    ask();
  });

  const edited = editedFields(form);
  restoreDraft(form, addRole, edited);
  const amounts = startAmounts(form, edited);
  if (edited.size) saveDraft(form);
  const set = (pairs) => {
    const names = pairs.split(";").map((pair) => pair.split("=")[0]);
    for (const pair of pairs.split(";")) {
      const [name, value] = pair.split("=");
      const field = form.elements[name];
      if (!field) continue;
      if (field.type === "checkbox") field.checked = value === "True" || value === "true";
      else field.value = value;
    }
    amounts.applied(names);
    saveDraft(form);
    shape();
    ask();
  };

  for (const part of form.querySelectorAll("[data-lines]")) startLineTable(part, form.elements[part.dataset.lines], ask);

  document.addEventListener("htmx:afterSwap", ({ detail }) => {
    markFields(form);
    if (detail.target !== rail || timer) return; // an answer to what was typed before
    isCurrent = true;
    if (launchPressed) form.requestSubmit(rail.querySelector("[type=submit]"));
  });
  for (const failure of ["htmx:responseError", "htmx:sendError"]) rail.addEventListener(failure, () => ask(RETRY_MS));
  document.addEventListener("input", (event) => {
    if (event.target.form !== form) return;
    shape(); // now, since a field that moves when this one loses the focus misses the click
    saveDraft(form);
    ask();
  });
  document.addEventListener("change", (event) => { if (event.target.form === form) { shape(); ask(); } });
  document.addEventListener("click", (event) => {
    const offer = event.target.closest("[data-set]");
    if (offer && (form.contains(offer) || rail.contains(offer))) set(offer.dataset.set);
  });
  startArchiveUpload(form, () => { saveDraft(form); ask(); });
  form.addEventListener("submit", (event) => {
    if (event.submitter?.getAttribute("aria-disabled") === "true") {
      event.preventDefault();
      const pressedEarly = !isCurrent;
      ask(0);
      launchPressed = pressedEarly;
      if (pressedEarly) event.submitter.textContent = translated("Checking"); // until the next preview
      rail.scrollIntoView({ block: "nearest" });
      return;
    }
    if (form.dataset.sent) { event.preventDefault(); return; } // a double click is one job
    form.dataset.sent = "1";
    markSent();
  });
  addEventListener("pageshow", () => { delete form.dataset.sent; });
  rail.addEventListener("pointerdown", (down) => keepClick(rail, down.target.closest("button"), down));
  shape();
  askNow(); // the page itself has no preview
}

// A click on a button that a new preview replaces while it is pressed counts for the new one, wherever that stands.
function keepClick(rail, pressed, down) {
  if (!pressed) return;
  document.addEventListener("pointerup", (up) => {
    if (pressed.isConnected || Math.hypot(up.clientX - down.clientX, up.clientY - down.clientY) > MAX_CLICK_PX) return;
    const isSame = (button) => button.type === pressed.type && button.dataset.set === pressed.dataset.set;
    [...rail.querySelectorAll("button")].find(isSame)?.click();
  }, { once: true });
}

// Writes what the preview refuses next to each field. A blank field is only missing, and the preview says so.
function markFields(form) {
  const errors = JSON.parse(document.getElementById("field-errors")?.dataset.errors ?? "{}");
  for (const field of form.querySelectorAll(".form-control[id], .form-select[id]")) {
    const message = (field.value.trim() && errors[field.name]) || "";
    const id = `${field.id}_error`;
    let note = document.getElementById(id);
    if (!note && !message) continue;
    if (!note) {
      note = document.createElement("p");
      note.id = id;
      note.className = "fw-hint fw-fail-t";
      field.after(note);
    }
    note.textContent = message;
    note.hidden = !message;
    if (message) field.setAttribute("aria-invalid", "true"); else field.removeAttribute("aria-invalid");
    const others = (field.getAttribute("aria-describedby") ?? "").split(" ").filter((each) => each && each !== id);
    field.setAttribute("aria-describedby", [...others, ...(message ? [id] : [])].join(" "));
  }
}

// Uploads a chosen archive at once, so that the review names it, and again for another project.
function startArchiveUpload(form, changed) {
  const file = form.elements.code_upload, archive = form.elements.code_archive, project = form.elements.project;
  if (!file || !archive) return;
  const note = document.createElement("p");
  note.className = "fw-hint";
  note.setAttribute("role", "status");
  file.after(note);
  let uploaded = ""; // the hash of the chosen file in the chosen project
  let latest = 0;
  const show = (text, isWrong) => { note.textContent = text; note.classList.toggle("fw-fail-t", isWrong); };
  const upload = async () => {
    const number = ++latest, chosen = file.files[0];
    if (uploaded && archive.value === uploaded) archive.value = "";
    uploaded = "";
    show(chosen ? translated("Uploading the archive…") : "", false);
    changed();
    if (!chosen) return;
    let answer = {}, accepted = false;
    try {
      const headers = { "X-CSRFToken": form.elements.csrfmiddlewaretoken.value, "Content-Type": "application/octet-stream" };
      const reply = await fetch(`/api/v1/projects/${encodeURIComponent(project.value)}/code/`, { method: "POST", headers, body: chosen });
      answer = await reply.json();
      accepted = reply.ok;
    } catch { /* the archive is sent with the form */ }
    if (number !== latest) return;
    if (accepted) archive.value = uploaded = answer.sha256;
    const refusal = answer.errors?.[0]?.message ?? answer.detail;
    show(accepted ? translated("Stored for the project.") : refusal ?? translated("Not uploaded yet; it is sent with the form."), !accepted);
    changed();
  };
  file.addEventListener("change", upload);
  const uploadChosen = () => { if (file.files.length) upload(); };
  project.addEventListener("change", uploadChosen);
  form.addEventListener("formdata", (event) => { if (uploaded && archive.value === uploaded) event.formData.delete("code_upload"); });
  uploadChosen(); // it may be older than this script
}

const PAIR = [/^([^=]+)=(.*)$/, ([target, value]) => `${target}=${value}`];
const LINES = {
  rank_overrides: [/^(\d+)\s+([^=]+)=(.*)$/, ([rank, name, value]) => `${rank} ${name}=${value}`],
  volumes: [/^(\S+)(?:\s+(\/\S*))?(?:\s+(ro))?$/, (words) => words.filter(Boolean).join(" ")],
  secret_variables: PAIR,
  secret_files: PAIR,
};

// Shows the lines of a text area as a table of inputs and choices; the text area is what is sent.
function startLineTable(part, text, ask) {
  const [table, row] = [...part.querySelectorAll("template")].map((each) => each.content);
  if (!table) return;
  const [pattern, format] = LINES[part.dataset.lines];
  const parsed = text.value.split("\n").filter((line) => line.trim()).map((line) => line.trim().match(pattern));
  const cellsOf = (line) => [...line.querySelectorAll("input, select")];
  const filled = (values) => {
    const line = row.cloneNode(true);
    cellsOf(line).forEach((cell, index) => { cell.value = values[index] || ""; });
    return line;
  };
  const isShown = (found) => found && cellsOf(filled(found.slice(1))).every((cell, index) => cell.value === (found[index + 1] || ""));
  if (!parsed.every(isShown)) return; // a line that is refused, or names what is not offered, is corrected as text
  part.append(table.cloneNode(true));
  const body = part.querySelector("tbody");
  const write = () => {
    const lines = [...body.rows].map((each) => cellsOf(each).map((cell) => cell.value.trim()));
    text.value = lines.filter((each) => each[0] || each[1]).map(format).join("\n");
    saveDraft(text.form);
    ask();
  };
  for (const found of parsed) body.append(filled(found.slice(1)));
  text.hidden = true;
  part.querySelector("[id$=_helptext]")?.setAttribute("hidden", ""); // it explains the notation of the text
  part.addEventListener("input", write);
  part.addEventListener("click", (event) => {
    if (event.target.closest("[data-line-add]")) { body.append(filled([])); cellsOf(body.lastElementChild)[0].focus(); }
    const removed = event.target.closest("[data-line-remove]");
    if (removed) { removed.closest("tr").remove(); write(); }
  });
}
