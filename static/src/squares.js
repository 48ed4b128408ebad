// GPU squares that show how busy they are, from the live samples; only where data moved.
import { onTopic } from "./live.js";

let watching = false;

export function rampOf(percent) {
  return percent === null || percent === undefined ? null : Math.min(4, Math.floor(percent / 20));
}

function draw(sample) {
  for (const gpu of sample.gpus ?? []) {
    const ramp = rampOf(gpu.utilisation_percent);
    if (ramp === null) continue;
    for (const square of document.querySelectorAll(`[data-gpu="${CSS.escape(gpu.uuid)}"][data-u]`)) {
      if (square.dataset.u !== String(ramp)) square.dataset.u = String(ramp);
    }
  }
}

export function watchIn() {
  if (watching) return;
  watching = true;
  onTopic("cluster", (data) => { if (data?.gpus) draw(data); for (const node of data?.nodes ?? []) draw(node); });
}
