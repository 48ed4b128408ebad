// Drafts of the launch form: kept in this tab until the form is launched, also across a new sign-in.
const SENT = "draft-sent";

const keyOf = () => `draft:${document.body.dataset.me}:${location.search}`;

export function saveDraft(form) {
  const values = [...new FormData(form)].filter(([name]) => name !== "csrfmiddlewaretoken");
  sessionStorage.setItem(keyOf(), JSON.stringify(values));
}

// Names of the fields that differ from the page as it was sent: they were edited before this script was loaded.
export function editedFields(form) {
  const differs = (field) => {
    if (field.type === "checkbox" || field.type === "radio") return field.checked !== field.defaultChecked;
    if (field.type === "file") return field.files.length > 0;
    if (field.options) return field.selectedIndex !== Math.max(0, [...field.options].findIndex((option) => option.defaultSelected));
    return field.type !== "hidden" && "defaultValue" in field && field.value !== field.defaultValue;
  };
  return new Set([...form.elements].filter((field) => field.name && differs(field)).map((field) => field.name));
}

// Fills in the draft of this address, if any, except for `edited` fields; `addRole` adds an empty role to the form.
export function restoreDraft(form, addRole, edited) {
  sessionStorage.removeItem(SENT);
  const saved = "bound" in form.dataset ? null : sessionStorage.getItem(keyOf());
  if (!saved) return;
  const values = new Map();
  for (const [name, value] of JSON.parse(saved)) values.set(name, [...(values.get(name) ?? []), value]);
  const roles = Number(values.get("roles-TOTAL_FORMS")?.[0] ?? 0);
  while (Number(form.elements["roles-TOTAL_FORMS"].value) < roles) addRole();
  for (const field of form.elements) {
    const isKept = field.type !== "hidden" || field.name.startsWith("roles-") || field.name === "typed_amounts";
    if (!field.name || field.type === "file" || !isKept || edited.has(field.name)) continue;
    const given = values.get(field.name) ?? [];
    if (field.type === "checkbox" || field.type === "radio") field.checked = given.includes(field.value);
    else if (given.length) field.value = given[0];
  }
  const note = form.querySelector("[data-draft]");
  note.hidden = false;
  form.querySelector("[data-remembered]")?.remove();
  note.querySelector("[data-draft-discard]").addEventListener("click", () => { sessionStorage.removeItem(keyOf()); location.reload(); });
}

export function markSent() { sessionStorage.setItem(SENT, keyOf()); }

// A launch that was accepted leads to another page of the same user; one that was not shows the form, or asks to sign in.
export function forgetSentDraft() {
  const key = sessionStorage.getItem(SENT);
  if (!key || !document.body.dataset.me || document.querySelector("[data-launch]")) return;
  sessionStorage.removeItem(key);
  sessionStorage.removeItem(SENT);
}
