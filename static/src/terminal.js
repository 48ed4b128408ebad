// A terminal in a running job: requests one, then transports input and output over its socket.
// Binary messages are typed and printed bytes; text messages are JSON: sizes and what has been shown so far from here,
// how it ended from there (agents/node/terminals/terminal.py).
import { FitAddon } from "@xterm/addon-fit";
import { Terminal } from "@xterm/xterm";
import { translated } from "./translations.js";

const ASK_EVERY_MS = 120;
const ASKED_AT_MOST_MS = 20_000;
const TYPED_AT_ONCE = 16 * 1024;
const SAY_SEEN_EVERY = 32 * 1024;
const RIGHT_ENDED = 1008;
const READER = "fairway-terminal-reader";

// The page's policy takes no style element without its nonce, and no style attribute that is set as text; xterm makes
// both. Elements created from here on have the nonce, and style attributes are set through the object model.
function keepPolicy() {
  const nonce = document.querySelector("script[nonce]").nonce;
  document.createElement = (name, ...more) => {
    const element = Document.prototype.createElement.call(document, name, ...more);
    if (name.toLowerCase() === "style") element.nonce = nonce;
    element.setAttribute = (key, value) => {
      if (key === "style") element.style.cssText = value;
      else Element.prototype.setAttribute.call(element, key, value);
    };
    return element;
  };
}

function coloursOf(box) {
  const look = getComputedStyle(box);
  const dark = look.colorScheme === "dark" || (look.colorScheme !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  const line = dark ? "#2a4a3b" : "#bcdccb";
  return { background: look.backgroundColor, foreground: look.color, cursor: look.color, cursorAccent: look.backgroundColor, selectionBackground: line };
}

const ENDS = {
  exited: (word) => (word.exit_code ? translated("The shell has exited with code {code}.", { code: word.exit_code }) : translated("The shell has exited.")),
  idle: () => translated("Closed because of inactivity."),
  task_ended: () => translated("The job has ended, so its terminals are closed."),
};

class Session {
  constructor(term, say, ended) {
    this.term = term;
    this.say = say;
    this.ended = ended;
    this.printed = 0;
    this.acknowledged = 0;
    this.last = "";
  }

  async open(form) {
    const wanted = new FormData(form);
    wanted.set("cols", this.term.cols);
    wanted.set("rows", this.term.rows);
    const answer = await fetch(form.action, { method: "POST", body: wanted, headers: { Accept: "application/json" } });
    let status = await answer.json();
    const until = Date.now() + ASKED_AT_MOST_MS;
    const { state } = status;
    while (!status.refusal && !status.listens) {
      if (Date.now() > until) throw new Error(translated("The node did not answer in time."));
      await new Promise((go) => { setTimeout(go, ASK_EVERY_MS); });
      status = await (await fetch(state, { headers: { Accept: "application/json" } })).json();
    }
    if (status.refusal) throw new Error(status.refusal);
    const place = new URL(status.socket, location.href);
    place.protocol = place.protocol.replace("http", "ws");
    this.socket = new WebSocket(place);
    this.socket.binaryType = "arraybuffer";
    this.socket.addEventListener("open", () => { this.say(""); this.resize(); });
    this.socket.addEventListener("message", (event) => this.hear(event.data));
    this.socket.addEventListener("close", (event) => this.close(event.code));
  }

  get isOpen() { return this.socket?.readyState === WebSocket.OPEN; }

  hear(data) {
    if (typeof data === "string") {
      const word = JSON.parse(data);
      this.last = ENDS[word.ended]?.(word) ?? translated("The terminal has ended.");
      return;
    }
    this.term.write(new Uint8Array(data), () => {
      this.printed += data.byteLength;
      if (this.printed - this.acknowledged < SAY_SEEN_EVERY || !this.isOpen) return;
      this.acknowledged = this.printed;
      this.socket.send(JSON.stringify({ seen: this.printed }));
    });
  }

  type(bytes) {
    if (!this.isOpen) return;
    for (let at = 0; at < bytes.length; at += TYPED_AT_ONCE) this.socket.send(bytes.subarray(at, at + TYPED_AT_ONCE));
  }

  resize() {
    if (this.isOpen) this.socket.send(JSON.stringify({ cols: this.term.cols, rows: this.term.rows }));
  }

  close(code) {
    if (!this.last) this.last = code === RIGHT_ENDED ? translated("You no longer have access to it.") : translated("The connection was lost, and the shell ended with it.");
    this.ended(this.last);
  }
}

function start(part) {
  const box = part.querySelector("[data-terminal-box]");
  const form = part.querySelector("[data-terminal-form]");
  const foot = part.querySelector("[data-terminal-foot]");
  const anew = form.querySelector("button");
  const reader = part.querySelector("[data-terminal-reader]");
  const say = (words) => { foot.textContent = words || translated("Connected."); };
  keepPolicy();
  const term = new Terminal({
    fontFamily: getComputedStyle(box).fontFamily,
    fontSize: 13,
    minimumContrastRatio: 4.5,
    scrollback: 5000,
    theme: coloursOf(box),
  });
  const fit = new FitAddon();
  term.loadAddon(fit);
  term.open(box);
  fit.fit();
  let session = null;
  const words = new TextEncoder();
  const begin = async () => {
    anew.hidden = true;
    say(translated("Opening …"));
    session = new Session(term, say, (why) => { say(why); anew.hidden = false; });
    try {
      await session.open(form);
      term.focus();
    } catch (problem) {
      say(problem.message);
      anew.hidden = false;
    }
  };
  try { term.options.screenReaderMode = reader.checked = localStorage.getItem(READER) === "1"; } catch { /* it is off */ }
  reader.addEventListener("change", () => {
    term.options.screenReaderMode = reader.checked;
    try { localStorage.setItem(READER, reader.checked ? "1" : "0"); } catch { /* for this page, then */ }
    term.focus();
  });
  term.onData((typed) => session.type(words.encode(typed)));
  term.onBinary((typed) => session.type(Uint8Array.from(typed, (letter) => letter.charCodeAt(0))));
  term.onResize(() => session?.resize());
  term.attachCustomKeyEventHandler((event) => {
    if (event.key === "F6" && event.shiftKey) { // the way out: Tab belongs to the shell
      if (event.type === "keydown") reader.focus();
      event.preventDefault();
      return false;
    }
    if (event.ctrlKey && event.shiftKey && event.key.toLowerCase() === "c" && term.hasSelection()) {
      if (event.type === "keydown") document.execCommand("copy");
      event.preventDefault();
      return false;
    }
    return true;
  });
  new ResizeObserver(() => fit.fit()).observe(box);
  const recolour = () => { term.options.theme = coloursOf(box); };
  addEventListener("fairway-colours", recolour);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  form.addEventListener("submit", (event) => { event.preventDefault(); term.reset(); begin(); });
  begin();
}

export function openTerminals(root) {
  for (const part of root.querySelectorAll("[data-terminal]:not([data-started])")) {
    part.setAttribute("data-started", "");
    start(part);
  }
}
