// Titles need a mouse; on touch screens a tap shows them too, until the next tap elsewhere.
const SHOWN_MS = 6000;
const GAP = 6;

let tip = null;
let timer = 0;

function hide() {
  clearTimeout(timer);
  tip?.remove();
  tip = null;
}

function show(element) {
  tip = document.createElement("div");
  tip.className = "fw-tip";
  tip.setAttribute("role", "status");
  tip.textContent = element.title;
  document.body.append(tip);
  const place = element.getBoundingClientRect();
  const left = Math.min(place.left, document.documentElement.clientWidth - tip.offsetWidth - GAP);
  const above = place.top - tip.offsetHeight - GAP;
  tip.style.left = `${Math.max(GAP, left)}px`;
  tip.style.top = `${above > GAP ? above : place.bottom + GAP}px`;
  timer = setTimeout(hide, SHOWN_MS);
}

export function startTips() {
  document.addEventListener("pointerup", (event) => {
    const had = tip;
    hide();
    if (event.pointerType === "mouse" || had?.contains(event.target)) return;
    const element = event.target.closest?.("[title]");
    if (element && !element.closest("a, button, summary, label")) show(element);
  });
  addEventListener("scroll", hide, { passive: true, capture: true });
  addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
}
