// Sign-in links and invitations have their code in the URL fragment, which no server log contains; the page posts it.
export function startCodeLink() {
  const form = document.querySelector("form[data-code-link]");
  if (!form) return;
  const code = location.hash.slice(1);
  if (!code) { form.querySelector("[data-no-code]").hidden = false; return; }
  history.replaceState(null, "", location.pathname);
  form.elements.code.value = code;
  if ("now" in form.dataset) form.requestSubmit();
}

export function startTimeZone() {
  const field = document.querySelector("[data-detect-time-zone]");
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  if (field && zone && [...field.options].some((option) => option.value === zone)) field.value = zone;
}

export function submitTicket() { // a single-use ticket for the workspace's own origin
  document.querySelector("form[data-submit-ticket]")?.requestSubmit();
}
