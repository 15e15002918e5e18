// The page: rendering, and the actions of keys and buttons.

import * as store from "./conversations.js";
import { element, showMarkdown } from "./markdown.js";
import { answer, models, ServerError } from "./stream.js";
import { isChinese, strings } from "./strings.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "max_tokens", "top_p", "seed", "presence_penalty", "frequency_penalty"];

let conversation = store.all()[0] ?? store.create();
/** The answer that is being generated, if any: its node, its conversation, and the controller that stops it. */
let generation = null;
/** The id of the message that is being edited, if any. */
let editing = null;

// Rendering

function renderAll() {
  renderList();
  renderThread();
  for (const name of ["system", ...NUMBERS]) $("settings").querySelector(`[name=${name}]`).value = conversation.settings[name] ?? "";
  const model = $("model");
  if ([...model.options].some((option) => option.value === conversation.settings.model)) model.value = conversation.settings.model;
}

function renderList() {
  const conversations = store.all();
  if (!conversations.some((other) => other.id === conversation.id)) conversations.unshift(conversation);
  $("list").replaceChildren(...conversations.map((item) => {
    const open = element("button", { className: "name", type: "button" }, item.title || strings.untitled);
    if (item.id === conversation.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => openConversation(item.id));
    return element("li", {}, open, icon("rename", "M4 16l1-4 8-8 3 3-8 8z", () => renameConversation(item.id)),
      icon("remove", "M4 6h12M8 6V4h4v2M6 6l1 10h6l1-10", () => deleteConversation(item.id)));
  }));
  $("title").textContent = conversation.title || strings.untitled;
  document.title = `${conversation.title || strings.untitled} – jingu`;
}

function icon(word, drawing, action) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
  svg.setAttribute("viewBox", "0 0 20 20");
  svg.setAttribute("aria-hidden", "true");
  path.setAttribute("d", drawing);
  svg.append(path);
  const control = element("button", { type: "button", className: "icon small", title: strings[word], ariaLabel: strings[word] }, svg);
  control.addEventListener("click", action);
  return control;
}

function renderThread() {
  const messages = store.path(conversation);
  $("thread").replaceChildren(...messages.map(renderMessage));
  $("empty").hidden = messages.length > 0;
  renderState();
  scrollToEnd();
}

function renderState() {
  const busy = generation !== null;
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("thread").setAttribute("aria-busy", String(busy));
}

function renderMessage(node) {
  const item = element("li", { className: node.role, id: `message-${node.id}` });
  item.append(element("h2", {}, strings[node.role]));
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
  if (node.role === "user") {
    Object.assign(body, { textContent: node.text, dir: "auto" });
    return;
  }
  // The reasoning before an answer is folded.
  let fold = body.previousElementSibling;
  if (node.reasoning && !fold?.matches(".reasoning")) {
    fold = element("details", { className: "reasoning" }, element("summary"), element("div"));
    body.before(fold);
  }
  if (node.reasoning) {
    const isOver = node.text || generation?.node !== node;
    fold.firstElementChild.textContent = isOver ? strings.reasoning : strings.reasons;
    showMarkdown(fold.lastElementChild, node.reasoning, strings);
  }
  showMarkdown(body, node.text, strings);
}

function tools(node) {
  const bar = element("div", { className: "tools" });
  const same = store.versions(conversation, node);
  const place = same.indexOf(node);
  if (same.length > 1) {
    const step = (by, word, sign) => {
      const control = button(sign, () => showVersion(same[place + by]), strings[word]);
      control.disabled = !same[place + by];
      return control;
    };
    const count = element("span", { ariaLabel: `${strings.version} ${place + 1}/${same.length}` }, `${place + 1}/${same.length}`);
    bar.append(element("span", { className: "versions" }, step(-1, "previous", "‹"), count, step(1, "next", "›")));
  }
  if (generation?.node === node) return bar;
  if (navigator.clipboard) bar.append(button(strings.copy, (event) => copy(node, event.target), strings.copyMessage));
  bar.append(button(strings.edit, () => edit(node)));
  if (node.role === "assistant") bar.append(button(strings.again, () => regenerate(node), strings.againTitle));
  const notes = [];
  if (node.tokens) notes.push(`${node.tokens} ${strings.tokens}`);
  if (node.rate) notes.push(strings.rate(node.rate.toFixed(node.rate < 10 ? 1 : 0)));
  if (node.end === "length") notes.push(strings.cut);
  if (node.end === "stopped") notes.push(strings.stopped);
  if (notes.length) bar.append(element("span", { className: "quiet" }, notes.join(" · ")));
  if (node.error !== undefined) bar.append(element("p", { className: "error" }, node.error));
  return bar;
}

function button(text, action, label) {
  const control = element("button", { type: "button", className: "plain" }, text);
  if (label) Object.assign(control, { title: label, ariaLabel: label });
  control.addEventListener("click", action);
  return control;
}

function editor(node) {
  const area = element("textarea", { value: node.text, ariaLabel: strings.edit, rows: Math.min(12, node.text.split("\n").length + 1) });
  const commit = () => {
    const text = area.value.trim();
    editing = null;
    if (text && (text !== node.text || node.role === "user")) {
      const fresh = store.add(conversation, node.parent, node.role, text);
      saveConversation(conversation);
      renderThread();
      if (fresh.role === "user") reply();
    } else renderThread();
    $("input").focus();
  };
  const discard = () => {
    editing = null;
    renderThread();
    $("input").focus();
  };
  area.addEventListener("keydown", (event) => {
    if (isSendKey(event)) {
      event.preventDefault();
      commit();
    } else if (event.key === "Escape") {
      event.stopPropagation();
      discard();
    }
  });
  const form = element("div", { className: "editor" }, area, element("div", { className: "tools" },
    button(node.role === "user" ? strings.saveSend : strings.save, commit), button(strings.cancel, discard)));
  queueMicrotask(() => area.focus());
  return form;
}

/** Apply a change; if the end of the thread was visible, keep it visible. */
function keepAtEnd(change) {
  const place = $("scroll");
  const seen = place.scrollHeight - place.scrollTop - place.clientHeight < 80;
  change();
  if (seen) place.scrollTop = place.scrollHeight;
}

function scrollToEnd() {
  $("scroll").scrollTop = $("scroll").scrollHeight;
}

function announce(text) {
  $("status").textContent = text;
}

// Actions

function saveConversation(target) {
  warn(store.save(target) ? "" : strings.full);
  renderList();
}

/** Show an error below the input; an empty text restores the hint. */
function warn(text) {
  Object.assign($("hint"), { className: text ? "error" : "", textContent: text || strings.hint });
}

function openConversation(id) {
  if (id === conversation.id) return closeSidebar();
  stopAnswer();
  editing = null;
  conversation = store.load(id) ?? conversation;
  renderAll();
  closeSidebar();
  $("input").focus();
}

function startConversation() {
  stopAnswer();
  editing = null;
  if (store.path(conversation).length) conversation = store.create({ ...conversation.settings });
  renderAll();
  closeSidebar();
  $("input").focus();
}

function renameConversation(id) {
  const target = id === conversation.id ? conversation : store.load(id);
  const name = prompt(strings.newName, target.title)?.trim();
  if (!name) return;
  target.title = name;
  saveConversation(target);
}

function deleteConversation(id) {
  if (!confirm(strings.sureRemove)) return;
  if (id === conversation.id) stopAnswer();
  store.remove({ id });
  if (id === conversation.id) {
    conversation = store.all()[0] ?? store.create({ ...conversation.settings });
  }
  renderAll();
  $("input").focus();
}

function edit(node) {
  stopAnswer();
  editing = node.id;
  renderThread();
  $(`message-${node.id}`).scrollIntoView({ block: "nearest" });
}

function showVersion(node) {
  stopAnswer();
  store.choose(conversation, node);
  saveConversation(conversation);
  renderThread();
}

function regenerate(node) {
  stopAnswer();
  conversation.leaf = node.parent;
  renderThread();
  reply();
}

async function copy(node, control) {
  await navigator.clipboard.writeText(node.text);
  control.textContent = strings.copied;
  setTimeout(() => (control.textContent = strings.copy), 1500);
}

function send() {
  const text = $("input").value.trim();
  if (!text || generation) return;
  $("input").value = "";
  fitInput();
  store.add(conversation, conversation.leaf, "user", text);
  saveConversation(conversation);
  renderThread();
  reply();
}

/** Stop the answer that is being generated, and keep its text so far. */
function stopAnswer() {
  if (!generation) return;
  generation.stop.abort();
  finish("stopped");
}

function finish(end) {
  const { node, conversation: where } = generation;
  node.end = end;
  generation = null;
  saveConversation(where);
  if (where === conversation) keepAtEnd(() => $(`message-${node.id}`)?.replaceWith(renderMessage(node)));
  renderState();
  announce(end === "stopped" ? strings.stopped : node.error ?? (end === "length" ? strings.cut : strings.answered));
}

/** Generate the answer to the last message. */
async function reply() {
  const messages = store.messages(conversation);
  const node = store.add(conversation, conversation.leaf, "assistant", "");
  const current = (generation = { node, conversation, stop: new AbortController() });
  $("thread").append(renderMessage(node));
  renderState();
  scrollToEnd();
  announce(strings.answering);
  let end = "stop";
  let first = 0;
  let last = 0;
  let saved = performance.now();
  try {
    for await (const chunk of answer({ messages, ...requestSettings() }, sessionStorage.getItem("jingu.key"), current.stop.signal)) {
      if (generation !== current) return;
      const choice = chunk.choices?.[0];
      const reasoning = choice?.delta?.reasoning_content;
      const content = choice?.delta?.content;
      if (reasoning) node.reasoning = (node.reasoning ?? "") + reasoning;
      if (content) node.text += content;
      if (reasoning || content) {
        last = performance.now();
        first ||= last;
        scheduleRefresh(current);
        if (last - saved > 1000) saved = (store.save(current.conversation), last);
      }
      end = choice?.finish_reason ?? end;
      node.tokens = chunk.usage?.completion_tokens ?? node.tokens;
    }
    if (node.tokens > 1 && last > first) node.rate = ((node.tokens - 1) / (last - first)) * 1000;
  } catch (error) {
    if (generation !== current) return;
    end = "error";
    node.error = error instanceof ServerError ? error.message || strings.broken : node.text ? strings.broken : strings.unreachable;
  }
  if (generation === current) finish(end);
}

/** Render the text received so far, at most once per frame. */
function scheduleRefresh(current) {
  if (current.waits) return;
  current.waits = true;
  requestAnimationFrame(() => {
    current.waits = false;
    const body = current === generation && document.querySelector(`#message-${current.node.id} .body`);
    if (body) keepAtEnd(() => fill(body, current.node));
  });
}

/** The conversation's settings as fields of a request. */
function requestSettings() {
  const { settings } = conversation;
  const numbers = NUMBERS.filter((name) => settings[name] !== undefined).map((name) => [name, settings[name]]);
  return { model: $("model").value, ...Object.fromEntries(numbers) };
}

// Keys and buttons

/** Enter, unless it confirms the candidate of an input method. */
const isSendKey = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229;

function fitInput() {
  const area = $("input");
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight}px`;
}

function openSidebar() {
  document.body.classList.add("side");
  $("open-side").setAttribute("aria-expanded", "true");
  $("close-side").focus();
}

function closeSidebar() {
  document.body.classList.remove("side");
  $("open-side").setAttribute("aria-expanded", "false");
}

function openNeighbor(by) {
  const conversations = store.all();
  const place = conversations.findIndex((item) => item.id === conversation.id);
  const next = conversations[place < 0 ? 0 : place + by];
  if (next) openConversation(next.id);
}

function download(kind) {
  const text = kind === "md" ? store.asMarkdown(conversation, strings) : store.asJson(conversation);
  const url = URL.createObjectURL(new Blob([text], { type: kind === "md" ? "text/markdown" : "application/json" }));
  const name = (conversation.title || strings.untitled).replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").slice(0, 40);
  element("a", { href: url, download: `${name || "jingu"}.${kind}` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

const ALT = {
  KeyN: startConversation,
  KeyR: () => {
    const last = store.path(conversation).at(-1);
    if (last) last.role === "assistant" ? regenerate(last) : reply();
  },
  Comma: () => $("settings").showModal(),
  ArrowUp: () => openNeighbor(-1),
  ArrowDown: () => openNeighbor(1),
};

document.addEventListener("keydown", (event) => {
  if ($("settings").open) return;
  if (event.key === "Escape") {
    if (document.body.classList.contains("side")) closeSidebar(), $("open-side").focus();
    else stopAnswer(), $("input").focus();
  } else if (event.altKey && !event.ctrlKey && !event.metaKey && ALT[event.code]) {
    event.preventDefault();
    ALT[event.code]();
  }
});

$("input").addEventListener("keydown", (event) => {
  if (isSendKey(event)) {
    event.preventDefault();
    send();
  } else if (event.key === "ArrowUp" && !event.altKey && !$("input").value) {
    const last = store.path(conversation).findLast((node) => node.role === "user");
    if (last) event.preventDefault(), edit(last);
  }
});
$("input").addEventListener("input", fitInput);
$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => {
  stopAnswer();
  $("input").focus();
});
$("new").addEventListener("click", startConversation);
$("open-side").addEventListener("click", openSidebar);
$("close-side").addEventListener("click", () => {
  closeSidebar();
  $("open-side").focus();
});
document.querySelector("main").addEventListener("click", (event) => event.target.closest("#open-side") || closeSidebar());
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("settings").addEventListener("change", (event) => {
  const { name, value, validity } = event.target;
  if (name === "theme") setTheme(value);
  else if (name === "key") {
    sessionStorage.setItem("jingu.key", value.trim());
    loadModels();
  } else if (validity.valid) {
    conversation.settings[name] = value === "" ? undefined : NUMBERS.includes(name) ? Number(value) : value;
    if (store.path(conversation).length) saveConversation(conversation);
  }
});
$("model").addEventListener("change", () => {
  conversation.settings.model = $("model").value;
  if (store.path(conversation).length) saveConversation(conversation);
});
$("export").addEventListener("change", () => {
  if ($("export").value) download($("export").value);
  $("export").value = "";
});
window.addEventListener("pagehide", stopAnswer);
window.addEventListener("storage", (event) => {
  if (!store.isStoreKey(event.key) || generation || editing !== null) return;
  conversation = store.load(conversation.id) ?? conversation;
  renderAll();
});

// Start

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("jingu.theme", name);
}

async function loadModels() {
  try {
    const names = await models(sessionStorage.getItem("jingu.key"));
    $("model").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
    warn("");
    if (names.includes(conversation.settings.model)) $("model").value = conversation.settings.model;
  } catch (error) {
    warn(error instanceof ServerError ? error.message : strings.unreachable);
  }
}

document.documentElement.lang = isChinese ? "zh-CN" : "en";
for (const node of document.querySelectorAll("[data-text]")) node.textContent = strings[node.dataset.text];
for (const node of document.querySelectorAll("[data-label]")) node.ariaLabel = strings[node.dataset.label];
for (const node of document.querySelectorAll("[data-title]")) node.title = strings[node.dataset.title];
$("input").placeholder = strings.placeholder;
$("starters").append(...strings.starterTexts.map((text) => {
  const control = element("button", { type: "button" }, text);
  control.addEventListener("click", () => {
    $("input").value = text;
    send();
  });
  return element("li", {}, control);
}));
$("keys").append(...strings.list.flatMap(([key, description]) => [element("dt", {}, element("kbd", {}, key)), element("dd", {}, description)]));
setTheme(localStorage.getItem("jingu.theme") ?? "");
$("settings").querySelector("[name=theme]").value = localStorage.getItem("jingu.theme") ?? "";
$("settings").querySelector("[name=key]").value = sessionStorage.getItem("jingu.key") ?? "";
renderAll();
loadModels();
$("input").focus();
