// GPU squares that show how busy they are, from the live samples; only where data moved.
import { onTopic } from "./live.js";

let watching = false;

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
  for (const square of document.querySelectorAll("[data-node][data-at][data-u]")) {
    const use = nodes?.[square.dataset.node]?.u;
    if (use) show(square, use[Number(square.dataset.at)]);
  }
}

export function watchIn() {
  if (watching) return;
  watching = true;
  onTopic("cluster", (data) => {
    if (data?.kind === "sample") drawCluster(data);
    if (data?.kind === "backfill" && data.last) drawCluster(data.last);
  });
}
