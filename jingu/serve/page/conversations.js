// Conversations, stored in this browser. A conversation is a tree: editing a message or regenerating an answer adds a
// branch, so no version is lost. The path from the first message to `leaf` is what the page shows and sends.

const PREFIX = "jingu.chat.";
let lastTime = 0;

/** A new conversation with the settings of another. */
export function create(settings = {}) {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "", changed: now(), settings, nodes: {}, leaf: null };
}

/** All stored conversations, newest first. */
export function all() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  return keys.map((key) => load(key.slice(PREFIX.length))).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

export function load(id) {
  try {
    const conversation = JSON.parse(localStorage.getItem(PREFIX + id));
    return conversation?.nodes ? conversation : null;
  } catch {
    return null;
  }
}

/** Returns false if the browser's storage is full. */
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export const remove = (conversation) => localStorage.removeItem(PREFIX + conversation.id);
export const isStoreKey = (key) => key === null || key.startsWith(PREFIX);

/** The messages from the first one to `leaf`. */
export function path(conversation) {
  const messages = [];
  for (let node = conversation.nodes[conversation.leaf]; node; node = conversation.nodes[node.parent]) messages.unshift(node);
  return messages;
}

/** Add a message after `parent` (null: as the first one), and make it the leaf. */
export function add(conversation, parent, role, text) {
  const id = String(Object.keys(conversation.nodes).length);
  const node = { id, parent, role, text };
  conversation.nodes[id] = node;
  conversation.leaf = id;
  if (!conversation.title && role === "user") conversation.title = text.trim().split("\n")[0].slice(0, 80);
  conversation.changed = now();
  return node;
}

/** All versions of a message, itself included. */
export function versions(conversation, node) {
  return Object.values(conversation.nodes).filter((other) => other.parent === node.parent);
}

/** Select this version of a message, with the latest branch after it. */
export function choose(conversation, node) {
  let leaf = node;
  for (let next = leaf; next; next = Object.values(conversation.nodes).findLast((other) => other.parent === leaf.id)) leaf = next;
  conversation.leaf = leaf.id;
}

/** The messages of a request. The model does not see its earlier reasoning. */
export function messages(conversation, withReasoning = false) {
  const system = conversation.settings.system?.trim();
  const turns = path(conversation).map(({ role, text, reasoning }) =>
    ({ role, content: text, ...(withReasoning && reasoning && { reasoning_content: reasoning }) }));
  return system ? [{ role: "system", content: system }, ...turns] : turns;
}

/** The selected path as JSON, whose `messages` are those of a row of instruction data. */
export function asJson(conversation) {
  const { system, ...settings } = conversation.settings;
  return JSON.stringify({ title: conversation.title, settings, messages: messages(conversation, true) }, null, 2) + "\n";
}

export function asMarkdown(conversation, strings) {
  const parts = messages(conversation).map(({ role, content }) => `## ${strings[role]}\n\n${content}\n`);
  return [`# ${conversation.title}\n`, ...parts].join("\n");
}

/** Milliseconds, never the same value twice, so that conversations have a definite order. */
function now() {
  lastTime = Math.max(Date.now(), lastTime + 1);
  return lastTime;
}
