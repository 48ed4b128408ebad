// Ranges on the axes of parallel coordinates: dragged with a mouse, or chosen in fields. Runs outside of one are faded.
import { translated } from "./translations.js";

const SIZE = 1000; // of the drawing, in its own units
const NEAR_PX = 16;
const CLICK_PX = 4;
const MARGIN = 12; // of a range around its first and last value, in the drawing's units
const SVG = "http://www.w3.org/2000/svg";

function options(field, values) {
  field.replaceChildren(...values.map((text, i) => new Option(text, String(i))));
}

function start(panel) {
  const drawing = panel.querySelector(".fw-par__p");
  const axes = [...drawing.querySelectorAll("[data-axis]")].map((line) => ({ ...JSON.parse(line.dataset.axis), x: line.x1.baseVal.value }));
  const runs = [...drawing.querySelectorAll("polyline")].map((line) => ({ line, places: line.dataset.places.split(",").map(Number) }));
  const brushes = axes.map(() => drawing.appendChild(document.createElementNS(SVG, "rect")));
  const chip = panel.querySelector("[data-range-chip]");
  const form = panel.querySelector("[data-range-form]");
  const { axis: axisField, low: lowField, high: highField } = form.elements;
  const ranges = new Map(); // by axis: the places of its first and last value

  const show = () => {
    const inside = ({ places }) => [...ranges].every(([i, [low, high]]) => places[i] >= low && places[i] <= high);
    let count = 0;
    for (const run of runs) {
      run.line.toggleAttribute("data-out", !inside(run));
      count += inside(run);
    }
    brushes.forEach((brush, i) => {
      brush.setAttribute("class", ranges.has(i) ? "brush" : "");
      const width = (14 * SIZE) / drawing.clientWidth;
      const ends = (ranges.get(i) ?? [0, 0]).map((place) => axes[i].heights[place]);
      const values = { x: axes[i].x - width / 2, width, y: Math.min(...ends) - MARGIN, height: Math.abs(ends[0] - ends[1]) + 2 * MARGIN };
      for (const [name, value] of Object.entries(values)) brush.setAttribute(name, String(value));
    });
    const parts = [...ranges].map(([i, [low, high]]) => {
      const { name, labels } = axes[i];
      return low === high ? `${name} ${labels[low]}` : translated("{name} {low} to {high}", { name, low: labels[low], high: labels[high] });
    });
    chip.hidden = parts.length === 0;
    const said = { ranges: parts.join(", "), count };
    chip.querySelector("[role=status]").textContent = parts.length === 0 ? "" : count === 1 ? translated("{ranges}: 1 run", said) : translated("{ranges}: {count} runs", said);
    const { labels } = axes[axisField.value];
    [lowField.value, highField.value] = (ranges.get(Number(axisField.value)) ?? [0, labels.length - 1]).map(String);
  };
  const choose = (i, low, high) => {
    if (low === 0 && high === axes[i].heights.length - 1) ranges.delete(i); else ranges.set(i, [low, high]);
    show();
  };
  const chooseAxis = (i) => {
    axisField.value = String(i);
    for (const field of [lowField, highField]) options(field, axes[i].labels);
    show();
  };

  axisField.addEventListener("change", () => chooseAxis(Number(axisField.value)));
  for (const field of [lowField, highField]) {
    field.addEventListener("change", () => choose(Number(axisField.value), ...[lowField, highField].map((each) => Number(each.value)).sort((a, b) => a - b)));
  }
  chip.querySelector("button").addEventListener("click", () => { ranges.clear(); show(); axisField.focus(); });

  let drag = null;
  drawing.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || event.button !== 0) return; // touch scrolls the page
    const box = drawing.getBoundingClientRect();
    const gap = (i) => Math.abs(box.left + (axes[i].x * box.width) / SIZE - event.clientX);
    const nearest = axes.reduce((best, axis, i) => (gap(i) < gap(best) ? i : best), 0);
    if (gap(nearest) > NEAR_PX) return;
    event.preventDefault();
    drawing.setPointerCapture(event.pointerId);
    drag = { axis: nearest, from: event.clientY };
    chooseAxis(nearest);
  });
  drawing.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const box = drawing.getBoundingClientRect();
    const ends = [drag.from, event.clientY].map((y) => ((y - box.top) * SIZE) / box.height);
    const inside = axes[drag.axis].heights.flatMap((height, place) => (height >= Math.min(...ends) - MARGIN && height <= Math.max(...ends) + MARGIN ? [place] : []));
    if (inside.length > 0) choose(drag.axis, inside[0], inside.at(-1));
  });
  drawing.addEventListener("pointerup", (event) => {
    if (drag && Math.abs(event.clientY - drag.from) < CLICK_PX) { ranges.delete(drag.axis); show(); } // a click clears the axis
    drag = null;
  });
  drawing.addEventListener("pointercancel", () => { drag = null; });

  new ResizeObserver(show).observe(drawing);
  options(axisField, axes.map(({ name }) => name));
  chooseAxis(0);
  form.hidden = false;
}

export function startRanges(root) {
  for (const panel of root.querySelectorAll("[data-parallel]")) {
    if (panel.dataset.started) continue;
    panel.dataset.started = "1";
    start(panel);
  }
}
