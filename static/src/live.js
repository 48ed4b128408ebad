// One WebSocket for the whole page. Elements name topics in `data-live`; a message for one of them fires the
// event `live` there, and htmx fetches the fragment again. Without the socket this happens every few seconds,
// and the chip in the page head shows the age of the data. It shows "live" once the server has acknowledged the
// subscriptions of the page; what was announced between rendering and subscription, the server sends as "missed".
// Messages can still be lost, so an open page also polls about once a minute.
import { translated } from "./translations.js";

const POLL_MS = 5000;
const FALLBACK_POLL_MS = 60000;
const DEBOUNCE_MS = 400; // several messages at once are one fetch
const FETCH_MS = 3000; // what was swapped in was made at most so long ago

const listeners = new Map(); // topic -> Set of functions(data)
const fetches = new WeakMap();
let socket = null;
let wait = 500;
let lastMessageAt = Date.now();
let open = false;
let isSubscribed = false; // the server has acknowledged what was subscribed to first
let again = false; // not the first try: anything may have happened meanwhile
let sampled = 0;
let lag = 0;

export function subscribe(topic, act) {
  if (!listeners.has(topic)) listeners.set(topic, new Set());
  listeners.get(topic).add(act);
  sendSubscription("subscribe", [topic]);
  return () => {
    const acts = listeners.get(topic);
    acts.delete(act);
    if (acts.size === 0) {
      listeners.delete(topic);
      if (!watched().has(topic)) sendSubscription("unsubscribe", [topic]);
    }
  };
}

function watched() {
  const topics = new Set(listeners.keys());
  for (const element of document.querySelectorAll("[data-live]")) {
    for (const topic of element.dataset.live.split(/\s+/)) if (topic) topics.add(topic);
  }
  return topics;
}

function sendSubscription(word, topics) {
  if (!open || !topics.length) return;
  socket.send(JSON.stringify(word === "subscribe" ? { subscribe: topics, since: since() } : { [word]: topics }));
}

function since() { // by the server's clock, what this page shows was true then: the page itself, later what was swapped in
  const made = Number(document.body.dataset.renderedAt) || undefined;
  if (!isSubscribed || !made) return made;
  const [came] = performance.getEntriesByType("navigation"); // never earlier than `made`, so the estimate is never late
  return made + Math.max(0, Math.round(performance.now() - (came?.responseStart ?? 0)) - FETCH_MS);
}

let subscribedTopics = new Set();
export function updateSubscriptions() { // after a swap: subscribe to what came, leave what went
  const now = watched();
  sendSubscription("subscribe", [...now].filter((topic) => !subscribedTopics.has(topic)));
  sendSubscription("unsubscribe", [...subscribedTopics].filter((topic) => !now.has(topic)));
  subscribedTopics = now;
}

function fire(element) {
  if (fetches.has(element)) return;
  fetches.set(element, setTimeout(() => {
    fetches.delete(element);
    if (!element.isConnected || document.visibilityState !== "visible") return;
    if (element.querySelector("[data-bulk]:checked")) return; // somebody is choosing
    window.htmx?.trigger(element, "live");
  }, DEBOUNCE_MS));
}

function fireAll() {
  for (const element of document.querySelectorAll("[data-live]")) fire(element);
}

const VALUE_KINDS = new Set(["sample", "backfill", "logs"]); // drawn in place; they change no fragment

function markSubscribed() {
  if (isSubscribed) return;
  isSubscribed = true;
  if (again) fireAll(); // what was missed
  updateStatusChip();
}

function handleMessage({ topic: named, data, error, subscribed }) {
  lastMessageAt = Date.now();
  if (subscribed) markSubscribed();
  if (error || !named) return;
  const { me } = document.body.dataset;
  const topic = named === `user.${me}` || named === `inbox.${me}` ? named.replace(me, "me") : named;
  if (data?.kind === "sample") { sampled = Date.now(); lag = data.lag_s ?? 0; }
  for (const act of listeners.get(topic) ?? []) act(data);
  if (VALUE_KINDS.has(data?.kind)) return;
  for (const element of document.querySelectorAll("[data-live]")) {
    if (element.dataset.live.split(/\s+/).includes(topic)) fire(element);
  }
}

function connect() {
  const { liveUrl } = document.body.dataset;
  if (!liveUrl) return;
  socket = new WebSocket(new URL(liveUrl, location.href.replace(/^http/, "ws")));
  socket.addEventListener("open", () => {
    again = wait > 500;
    open = true; wait = 500; lastMessageAt = Date.now(); subscribedTopics = watched();
    if (subscribedTopics.size) sendSubscription("subscribe", [...subscribedTopics]); else markSubscribed();
    updateStatusChip();
  });
  socket.addEventListener("message", (event) => { try { handleMessage(JSON.parse(event.data)); } catch (e) { if (!(e instanceof SyntaxError)) throw e; } });
  socket.addEventListener("close", (event) => {
    open = isSubscribed = false;
    if (event.code === 4401) return; // signed out: the next request redirects to sign-in
    setTimeout(connect, wait * (0.75 + Math.random() / 2));
    wait = Math.min(wait * 2, 15000);
    updateStatusChip();
  });
}

function updateStatusChip() {
  const age = Math.round((Date.now() - lastMessageAt) / 1000);
  for (const mark of document.querySelectorAll("[data-live-chip]")) {
    if (open && !isSubscribed && age * 1000 < POLL_MS) continue; // as it was: "connecting", or how old the data is
    const silent = sampled ? Math.round((Date.now() - sampled) / 1000 + lag) : 0;
    if (isSubscribed && silent < 10) {
      mark.removeAttribute("data-late");
      mark.textContent = sampled ? translated("live, {seconds} s old", { seconds: lag.toFixed(1) }) : translated("live");
      continue;
    }
    if (isSubscribed) { mark.setAttribute("data-late", ""); mark.textContent = translated("values are {silent} s old", { silent }); continue; }
    mark.setAttribute("data-late", "");
    mark.textContent = translated("data is {age} s old", { age });
  }
}

let lastPollAt = Date.now();
let pause = FALLBACK_POLL_MS;

function poll() {
  if (document.visibilityState !== "visible" || (isSubscribed && Date.now() - lastPollAt < pause)) return;
  lastPollAt = Date.now();
  pause = FALLBACK_POLL_MS * (0.75 + Math.random() / 2); // pages that were opened together do not look together
  fireAll();
}

export function startLive() {
  connect();
  document.addEventListener("htmx:afterRequest", (event) => {
    if (event.detail.successful) lastMessageAt = Date.now();
  });
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") fireAll();
  });
  addEventListener("pageshow", (event) => { if (event.persisted) fireAll(); }); // it stood still in the browser's memory
  setInterval(updateStatusChip, 1000);
  setInterval(poll, POLL_MS);
}
