// CPU, memory and shared memory of a form: they follow its GPUs, except those that the user typed.
import { editedFields } from "./drafts.js";
import { translated } from "./translations.js";

const AMOUNTS = ["cores", "memory_gib", "shm_mib"];
const GPU_FIELDS = ["gpus_per_task", "milli_per_gpu", "gpu_model", "mig_profile", "pool"];
const WHOLE_MILLI = 1000;
const SHARED_PART = 8; // shared memory is this part of the memory
const SHARED_MIB = 64;

const down = (value, step) => (value >= step ? Math.floor(value / step) * step : Math.floor(value));
const sharedMib = (memoryMib) => Math.min(memoryMib, Math.max(SHARED_MIB, down(memoryMib / SHARED_PART, 1024)));

// `edited`: names of the fields that were edited before this script was loaded.
export function startAmounts(form, edited = editedFields(form)) {
  if (form.dataset.follows) return null;
  form.dataset.follows = "1";
  const { shares, defaults } = JSON.parse(form.dataset.amounts);
  const record = form.elements.typed_amounts;
  const fields = new Map();
  for (const name of AMOUNTS) {
    const field = form.elements[name];
    if (field && !field.readOnly) fields.set(name, field); // a parameter of the template fills the others
  }
  const typed = new Set(record.value.split(" ").filter((name) => AMOUNTS.includes(name)));
  const valueOf = (name) => form.elements[name]?.value ?? "";

  const inProportion = () => {
    const count = Number(valueOf("gpus_per_task"));
    if (!(count >= 1)) return { ...defaults };
    const pool = valueOf("pool"), models = valueOf("gpu_model").split("|");
    const fitting = shares.filter((share) => (!pool || share.pool === pool) && (!models[0] || models.includes(share.model)));
    if (!fitting.length) return null;
    const milli = count * (count === 1 && !valueOf("mig_profile") ? Number(valueOf("milli_per_gpu")) || WHOLE_MILLI : WHOLE_MILLI);
    const amount = (key, step) => down(milli * Math.min(...fitting.map((share) => share[key])) / WHOLE_MILLI, step);
    const memory = Math.max(32, amount("memory_mib", 1024)), cores = Math.max(100, amount("cpu_milli", 1000));
    return { cores: cores / 1000, memory_gib: memory / 1024, shm_mib: sharedMib(memory) };
  };
  const current = () => {
    const values = inProportion();
    if (values && typed.has("memory_gib") && Number(valueOf("memory_gib")) > 0) values.shm_mib = sharedMib(Math.round(Number(valueOf("memory_gib")) * 1024));
    return values;
  };
  const follow = (given = []) => {
    const values = current();
    if (!values) return;
    for (const [name, field] of fields) if (!typed.has(name) && !given.includes(name)) field.value = values[name];
  };
  const show = () => {
    record.value = ["recorded", ...AMOUNTS.filter((name) => typed.has(name))].join(" ");
    for (const [name, field] of fields) showNote(field, name, typed.has(name));
  };

  form.addEventListener("input", ({ target }) => {
    if (fields.has(target.name)) {
      if (target.value.trim()) typed.add(target.name); else typed.delete(target.name);
      if (target.name === "memory_gib") follow(); // shared memory is a part of it
      show();
    } else if (GPU_FIELDS.includes(target.name)) follow();
  }, true); // before the form is saved and sent for a preview
  form.addEventListener("click", (event) => {
    const name = event.target.closest("[data-follow]")?.dataset.follow;
    if (!name) return;
    typed.delete(name);
    follow();
    show();
    fields.get(name).focus();
    record.dispatchEvent(new Event("input", { bubbles: true }));
  });
  for (const name of edited) if (fields.get(name)?.value.trim()) typed.add(name);
  if (edited.has("memory_gib") || GPU_FIELDS.some((name) => edited.has(name))) follow();
  show();
  return {
    /** Fields of these names have values that a suggestion gave, which stay until the GPUs change; others follow now. */
    applied(names) {
      follow(names);
      show();
    },
  };
}

// Says beside an amount that it does not follow the GPUs, and offers that it does.
function showNote(field, name, isTyped) {
  const id = `${field.id}_typed`;
  let note = document.getElementById(id);
  if (!isTyped) { note?.remove(); describe(field, id, false); return; }
  if (note) return;
  note = document.createElement("p");
  note.id = id;
  note.className = "fw-hint";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "fw-link";
  button.dataset.follow = name;
  button.textContent = translated("Follow the GPUs");
  note.append(translated("Stays as typed when the GPUs change."), " ", button);
  field.after(note);
  describe(field, id, true);
}

function describe(field, id, isShown) {
  const others = (field.getAttribute("aria-describedby") ?? "").split(" ").filter((each) => each && each !== id);
  const ids = [...others, ...(isShown ? [id] : [])];
  if (ids.length) field.setAttribute("aria-describedby", ids.join(" ")); else field.removeAttribute("aria-describedby");
}
