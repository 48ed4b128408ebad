// Colours GPU squares by their use, from the live samples; only squares with new data are updated.
import { subscribe } from "./live.js";

let watching = false;
let last = null;

export function rampOf(percent) {
  return percent === null || percent === undefined ? null : Math.min(4, Math.floor(percent / 20));
}

function show(square, percent) {
  const ramp = rampOf(percent);
  if (ramp !== null && square.dataset.u !== String(ramp)) square.dataset.u = String(ramp);
}

export function drawGpus(gpus) { // by UUID: samples of one job or one node
  for (const gpu of gpus) {
    for (const square of document.querySelectorAll(`[data-gpu="${CSS.escape(gpu.uuid)}"][data-u]`)) show(square, gpu.utilisation_percent);
  }
}

function drawCluster({ nodes }) { // arrays by node, in the order of its GPUs
  for (const row of document.querySelectorAll("[data-node]")) {
    const use = nodes?.[row.dataset.node]?.u;
    if (!use) continue;
    for (const square of row.querySelectorAll("[data-at][data-u]")) show(square, use[Number(square.dataset.at)]);
  }
}

export function watchGpuSquares() { // a fragment that was fetched anew shows the last sample at once
  if (last) drawCluster(last);
  if (watching) return;
  watching = true;
  subscribe("cluster", (data) => {
    const sample = data?.kind === "backfill" ? data.last : data?.kind === "sample" ? data : null;
    if (sample) { last = sample; drawCluster(sample); }
  });
}
