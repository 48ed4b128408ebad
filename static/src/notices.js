// Desktop notifications of notices while a page is open, and push messages for when none is. Several tabs and the push
// message show one notification, by its tag.
import { subscribe } from "./live.js";
import { translated } from "./translations.js";

export function startNotices() {
  if (!document.body.dataset.me || !window.Notification) return;
  subscribe("inbox.me", (data) => {
    if (data?.kind !== "notice" || !data.desktop || Notification.permission !== "granted") return;
    const shown = new Notification(data.title, { body: data.message, tag: data.notice });
    shown.addEventListener("click", () => { window.focus(); location.assign("/inbox/"); });
  });
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-desktop-ask], [data-push-ask]");
    if (!button) return;
    await Notification.requestPermission();
    showDesktopPermission(document.body);
    if (button.matches("[data-push-ask]")) await subscribePush(button.form).catch((problem) => {
      const text = document.getElementById("push-error");
      text.textContent = translated("This browser could not subscribe: {problem}", { problem: problem.message });
      text.hidden = false;
    });
  });
  showThisBrowser();
}

export function showDesktopPermission(root) {
  const state = window.Notification?.permission ?? "unsupported"; // also without HTTPS
  for (const part of root.querySelectorAll("[data-desktop]")) part.hidden = part.dataset.desktop !== state;
}

async function subscribePush(form) {
  await navigator.serviceWorker.register(form.dataset.worker);
  const registration = await navigator.serviceWorker.getRegistration(form.dataset.worker);
  await (await registration.pushManager.getSubscription())?.unsubscribe(); // it may have another key
  const subscription = await registration.pushManager.subscribe({ userVisibleOnly: true, applicationServerKey: form.dataset.key });
  const { endpoint, keys } = subscription.toJSON();
  const values = { url: endpoint, p256dh: keys.p256dh, auth: keys.auth, label: browserName() };
  for (const [name, value] of Object.entries(values)) form.elements[name].value = value;
  form.submit();
}

async function showThisBrowser() { // names this browser in the list, and offers to add it if it is not there
  const form = document.querySelector("[data-push-form]");
  if (!form || !navigator.serviceWorker || !window.PushManager) return;
  const subscription = await (await navigator.serviceWorker.getRegistration(form.dataset.worker))?.pushManager.getSubscription();
  const digest = subscription && await crypto.subtle.digest("SHA-256", new TextEncoder().encode(subscription.endpoint));
  const own = digest && [...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
  const row = own && document.querySelector(`[data-browser="${own}"]`);
  if (row) row.querySelector("[data-this-browser]").hidden = false;
  else form.hidden = false;
}

function browserName() {
  const [, name] = /(Edg|OPR|Firefox|Chrome|Safari)\//.exec(navigator.userAgent.replace(/.*(?=Edg\/|OPR\/)/, "")) ?? [];
  const [, system] = /(Windows|Android|iPhone|iPad|Mac OS X|Linux)/.exec(navigator.userAgent) ?? [];
  return [{ Edg: "Edge", OPR: "Opera" }[name] ?? name ?? "Browser", system].filter(Boolean).join(" on ");
}
