// The page: what is shown, and what keys and buttons do.

import * as kept from "./conversations.js";
import { element, show } from "./markdown.js";
import { answer, models, ServerError } from "./stream.js";
import { chinese, words } from "./words.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "max_tokens", "top_p", "seed", "presence_penalty", "frequency_penalty"];

let conversation = kept.all()[0] ?? kept.create();
/** The answer that is being written, if one is: its node, conversation, and what stops it. */
let writing = null;
/** The message that is being edited, if one is. */
let editing = null;

// What is shown

function drawAll() {
  drawList();
  drawThread();
  for (const name of ["system", ...NUMBERS]) $("settings").querySelector(`[name=${name}]`).value = conversation.settings[name] ?? "";
  const model = $("model");
  if ([...model.options].some((option) => option.value === conversation.settings.model)) model.value = conversation.settings.model;
}

function drawList() {
  const known = kept.all();
  if (!known.some((each) => each.id === conversation.id)) known.unshift(conversation);
  $("list").replaceChildren(...known.map((each) => {
    const open = element("button", { className: "name", type: "button" }, each.title || words.untitled);
    if (each.id === conversation.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => enter(each.id));
    return element("li", {}, open, icon("rename", "M4 16l1-4 8-8 3 3-8 8z", () => rename(each.id)),
      icon("remove", "M4 6h12M8 6V4h4v2M6 6l1 10h6l1-10", () => forget(each.id)));
  }));
  $("title").textContent = conversation.title || words.untitled;
  document.title = `${conversation.title || words.untitled} – jingu`;
}

function icon(word, drawing, action) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", drawing);
  svg.append(path);
  const made = element("button", { type: "button", className: "icon small", title: words[word], ariaLabel: words[word] }, svg);
  made.addEventListener("click", action);
  return made;
}

function drawThread() {
  const shown = kept.path(conversation);
  $("thread").replaceChildren(...shown.map(drawMessage));
  $("empty").hidden = shown.length > 0;
  drawState();
  toEnd();
}

function drawState() {
  const busy = writing !== null;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("thread").setAttribute("aria-busy", String(busy));
}

function drawMessage(node) {
  const item = element("li", { className: node.role, id: `message-${node.id}` });
  item.append(element("h2", {}, words[node.role]));
  if (editing === node.id) {
    item.append(editor(node));
    return item;
  }
  const body = element("div", { className: "body" });
  item.append(body);
  fill(body, node);
  item.append(tools(node));
  return item;
}

function fill(body, node) {
  if (node.role === "user") body.textContent = node.text;
  else show(body, node.text, words);
}

function tools(node) {
  const bar = element("div", { className: "tools" });
  const same = kept.versions(conversation, node);
  const place = same.indexOf(node);
  if (same.length > 1) {
    const step = (by, word, sign) => {
      const made = button(sign, () => turn(same[place + by]), words[word]);
      made.disabled = !same[place + by];
      return made;
    };
    const count = element("span", { ariaLabel: `${words.version} ${place + 1}/${same.length}` }, `${place + 1}/${same.length}`);
    bar.append(element("span", { className: "versions" }, step(-1, "previous", "‹"), count, step(1, "next", "›")));
  }
  if (writing?.node === node) return bar;
  if (navigator.clipboard) bar.append(button(words.copy, (event) => copy(node, event.target), words.copyMessage));
  bar.append(button(words.edit, () => edit(node)));
  if (node.role === "assistant") bar.append(button(words.again, () => again(node), words.againTitle));
  const notes = [];
  if (node.tokens) notes.push(`${node.tokens} ${words.tokens}`);
  if (node.rate) notes.push(words.rate(node.rate.toFixed(node.rate < 10 ? 1 : 0)));
  if (node.end === "length") notes.push(words.cut);
  if (node.end === "stopped") notes.push(words.stopped);
  if (notes.length) bar.append(element("span", { className: "quiet" }, notes.join(" · ")));
  if (node.error !== undefined) bar.append(element("p", { className: "error" }, node.error));
  return bar;
}

function button(text, action, label) {
  const made = element("button", { type: "button", className: "plain" }, text);
  if (label) Object.assign(made, { title: label, ariaLabel: label });
  made.addEventListener("click", action);
  return made;
}

function editor(node) {
  const area = element("textarea", { value: node.text, ariaLabel: words.edit, rows: Math.min(12, node.text.split("\n").length + 1) });
  const done = () => {
    const text = area.value.trim();
    editing = null;
    if (text && (text !== node.text || node.role === "user")) {
      const fresh = kept.add(conversation, node.parent, node.role, text);
      keep(conversation);
      drawThread();
      if (fresh.role === "user") reply();
    } else drawThread();
    $("input").focus();
  };
  const leave = () => {
    editing = null;
    drawThread();
    $("input").focus();
  };
  area.addEventListener("keydown", (event) => {
    if (sends(event)) {
      event.preventDefault();
      done();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      leave();
    }
  });
  const made = element("div", { className: "editor" }, area, element("div", { className: "tools" },
    button(node.role === "user" ? words.saveSend : words.save, done), button(words.cancel, leave)));
  queueMicrotask(() => area.focus());
  return made;
}

/** Change what is shown, and keep the end in sight where it was in sight. */
function atEnd(change) {
  const place = $("scroll");
  const seen = place.scrollHeight - place.scrollTop - place.clientHeight < 80;
  change();
  if (seen) place.scrollTop = place.scrollHeight;
}

function toEnd() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

function tell(text) {
  $("status").textContent = text;
}

// What is done

function keep(which) {
  warn(kept.save(which) ? "" : words.full);
  drawList();
}

/** Say under the input what is wrong; with no text, that nothing is. */
function warn(text) {
  Object.assign($("hint"), { className: text ? "error" : "", textContent: text || words.hint });
}

function enter(id) {
  if (id === conversation.id) return closeSide();
  halt();
  editing = null;
  conversation = kept.load(id) ?? conversation;
  drawAll();
  closeSide();
  $("input").focus();
}

function begin() {
  halt();
  editing = null;
  if (kept.path(conversation).length) conversation = kept.create({ ...conversation.settings });
  drawAll();
  closeSide();
  $("input").focus();
}

function rename(id) {
  const which = id === conversation.id ? conversation : kept.load(id);
  const name = prompt(words.newName, which.title)?.trim();
  if (!name) return;
  which.title = name;
  keep(which);
}

function forget(id) {
  if (!confirm(words.sureRemove)) return;
  if (id === conversation.id) halt();
  kept.remove({ id });
  if (id === conversation.id) {
    conversation = kept.all()[0] ?? kept.create({ ...conversation.settings });
  }
  drawAll();
  $("input").focus();
}

function edit(node) {
  halt();
  editing = node.id;
  drawThread();
  $(`message-${node.id}`).scrollIntoView({ block: "nearest" });
}

function turn(node) {
  halt();
  kept.choose(conversation, node);
  keep(conversation);
  drawThread();
}

function again(node) {
  halt();
  conversation.leaf = node.parent;
  drawThread();
  reply();
}

async function copy(node, pressed) {
  await navigator.clipboard.writeText(node.text);
  pressed.textContent = words.copied;
  setTimeout(() => (pressed.textContent = words.copy), 1500);
}

function send() {
  const text = $("input").value.trim();
  if (!text || writing) return;
  $("input").value = "";
  fit();
  kept.add(conversation, conversation.leaf, "user", text);
  keep(conversation);
  drawThread();
  reply();
}

/** Stop the answer that is being written; what there is of it stays. */
function halt() {
  if (!writing) return;
  writing.stop.abort();
  finish("stopped");
}

function finish(end) {
  const { node, conversation: where } = writing;
  node.end = end;
  writing = null;
  keep(where);
  if (where === conversation) atEnd(() => $(`message-${node.id}`)?.replaceWith(drawMessage(node)));
  drawState();
  tell(end === "stopped" ? words.stopped : node.error ?? (end === "length" ? words.cut : words.answered));
}

/** Let the model answer the last message. */
async function reply() {
  const sent = kept.messages(conversation);
  const node = kept.add(conversation, conversation.leaf, "assistant", "");
  const mine = (writing = { node, conversation, stop: new AbortController() });
  $("thread").append(drawMessage(node));
  drawState();
  toEnd();
  tell(words.answering);
  let end = "stop";
  let first = 0;
  let last = 0;
  let saved = performance.now();
  try {
    for await (const chunk of answer({ messages: sent, ...asked() }, sessionStorage.getItem("jingu.key"), mine.stop.signal)) {
      if (writing !== mine) return;
      const choice = chunk.choices?.[0];
      if (choice?.delta?.content) {
        node.text += choice.delta.content;
        last = performance.now();
        first ||= last;
        refresh(mine);
        if (last - saved > 1000) saved = (kept.save(mine.conversation), last);
      }
      end = choice?.finish_reason ?? end;
      node.tokens = chunk.usage?.completion_tokens ?? node.tokens;
    }
    if (node.tokens > 1 && last > first) node.rate = ((node.tokens - 1) / (last - first)) * 1000;
  } catch (error) {
    if (writing !== mine) return;
    end = "error";
    node.error = error instanceof ServerError ? error.message || words.broken : node.text ? words.broken : words.unreachable;
  }
  if (writing === mine) finish(end);
}

/** Show what has come, at most once a frame. */
function refresh(mine) {
  if (mine.waits) return;
  mine.waits = true;
  requestAnimationFrame(() => {
    mine.waits = false;
    const body = mine === writing && document.querySelector(`#message-${mine.node.id} .body`);
    if (body) atEnd(() => fill(body, mine.node));
  });
}

/** The settings of the conversation as the server takes them. */
function asked() {
  const { settings } = conversation;
  const numbers = NUMBERS.filter((name) => settings[name] !== undefined).map((name) => [name, settings[name]]);
  return { model: $("model").value, ...Object.fromEntries(numbers) };
}

// Keys and buttons

/** Enter, where it is not what chooses a word in an input method. */
const sends = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

function fit() {
  const area = $("input");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

function openSide() {
  document.body.classList.add("side");
  $("open-side").setAttribute("aria-expanded", "true");
  $("close-side").focus();
}

function closeSide() {
  document.body.classList.remove("side");
  $("open-side").setAttribute("aria-expanded", "false");
}

function neighbour(by) {
  const known = kept.all();
  const place = known.findIndex((each) => each.id === conversation.id);
  const next = known[place < 0 ? 0 : place + by];
  if (next) enter(next.id);
}

function download(kind) {
  const text = kind === "md" ? kept.asMarkdown(conversation, words) : kept.asJson(conversation);
  const url = URL.createObjectURL(new Blob([text], { type: kind === "md" ? "text/markdown" : "application/json" }));
  const name = (conversation.title || words.untitled).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  element("a", { href: url, download: `${name || "jingu"}.${kind}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const ALT = {
  KeyN: begin,
  KeyR: () => {
    const last = kept.path(conversation).at(-1);
    if (last) last.role === "assistant" ? again(last) : reply();
  },
  Comma: () => $("settings").showModal(),
  ArrowUp: () => neighbour(-1),
  ArrowDown: () => neighbour(1),
};

document.addEventListener("keydown", (event) => {
  if ($("settings").open) return;
  if (event.key === "Escape") {
    if (document.body.classList.contains("side")) closeSide(), $("open-side").focus();
    else halt(), $("input").focus();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey && ALT[event.code]) {
    event.preventDefault();
    ALT[event.code]();
  }
});

$("input").addEventListener("keydown", (event) => {
  if (sends(event)) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !event.altKey && !$("input").value) {
    const last = kept.path(conversation).findLast((node) => node.role === "user");
    if (last) event.preventDefault(), edit(last);
  }
});
$("input").addEventListener("input", fit);
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => {
  halt();
  $("input").focus();
});
$("new").addEventListener("click", begin);
$("open-side").addEventListener("click", openSide);
$("close-side").addEventListener("click", () => {
  closeSide();
  $("open-side").focus();
});
document.querySelector("main").addEventListener("click", (event) => event.target.closest("#open-side") || closeSide());
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("change", (event) => {
  const { name, value, validity } = event.target;
  if (name === "theme") setTheme(value);
  else if (name === "key") {
    sessionStorage.setItem("jingu.key", value.trim());
    learnModels();
  } else if (validity.valid) {
    conversation.settings[name] = value === "" ? undefined : NUMBERS.includes(name) ? Number(value) : value;
    if (kept.path(conversation).length) keep(conversation);
  }
});
$("model").addEventListener("change", () => {
  conversation.settings.model = $("model").value;
  if (kept.path(conversation).length) keep(conversation);
});
$("export").addEventListener("change", () => {
  if ($("export").value) download($("export").value);
  $("export").value = "";
});
window.addEventListener("pagehide", halt);
window.addEventListener("storage", (event) => {
  if (!kept.isOurs(event.key) || writing || editing !== null) return;
  conversation = kept.load(conversation.id) ?? conversation;
  drawAll();
});

// The beginning

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("jingu.theme", name);
}

async function learnModels() {
  try {
    const names = await models(sessionStorage.getItem("jingu.key"));
    $("model").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    warn("");
    if (names.includes(conversation.settings.model)) $("model").value = conversation.settings.model;
  } catch (error) {
    warn(error instanceof ServerError ? error.message : words.unreachable);
  }
}

document.documentElement.lang = chinese ? "zh-CN" : "en";
for (const each of document.querySelectorAll("[data-word]")) each.textContent = words[each.dataset.word];
for (const each of document.querySelectorAll("[data-label]")) each.ariaLabel = words[each.dataset.label];
for (const each of document.querySelectorAll("[data-title]")) each.title = words[each.dataset.title];
$("input").placeholder = words.placeholder;
$("keys").append(...words.list.flatMap(([key, told]) => [element("dt", {}, element("kbd", {}, key)), element("dd", {}, told)]));
setTheme(localStorage.getItem("jingu.theme") ?? "");
$("settings").querySelector("[name=theme]").value = localStorage.getItem("jingu.theme") ?? "";
$("settings").querySelector("[name=key]").value = sessionStorage.getItem("jingu.key") ?? "";
drawAll();
learnModels();
$("input").focus();
