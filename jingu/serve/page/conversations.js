// Conversations, kept in this browser. One is a tree: to edit a message or to ask for another answer adds a branch, and
// nothing that was said is lost. The path from the first message to `leaf` is what is shown and sent.

const PREFIX = "jingu.chat.";
let lastTime = 0;

/** A new conversation with the settings of another. */
export function create(settings = {}) {
  return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "", changed: now(), settings, nodes: {}, leaf: null };
}

/** All that are kept, newest first. */
export function all() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  return keys.map((key) => load(key.slice(PREFIX.length))).filter(Boolean).sort((a, b) => b.changed - a.changed);
}

export function load(id) {
  try {
    const found = JSON.parse(localStorage.getItem(PREFIX + id));
    return found?.nodes ? found : null;
  } catch {
    return null;
  }
}

/** Returns false where the browser has no room left. */
export function save(conversation) {
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export const remove = (conversation) => localStorage.removeItem(PREFIX + conversation.id);
export const isOurs = (key) => key === null || key.startsWith(PREFIX);

/** The messages from the first to `leaf`. */
export function path(conversation) {
  const found = [];
  for (let node = conversation.nodes[conversation.leaf]; node; node = conversation.nodes[node.parent]) found.unshift(node);
  return found;
}

/** Add a message after `parent` (null: the first), and make it the end of what is shown. */
export function add(conversation, parent, role, text) {
  const id = String(Object.keys(conversation.nodes).length);
  const node = { id, parent, role, text };
  conversation.nodes[id] = node;
  conversation.leaf = id;
  if (!conversation.title && role === "user") conversation.title = text.trim().split("\n")[0].slice(0, 80);
  conversation.changed = now();
  return node;
}

/** The versions of a message: it, and what was said in its place. */
export function versions(conversation, node) {
  return Object.values(conversation.nodes).filter((each) => each.parent === node.parent);
}

/** Show this version of a message, and what was said after it last. */
export function choose(conversation, node) {
  let leaf = node;
  for (let next = leaf; next; next = Object.values(conversation.nodes).findLast((each) => each.parent === leaf.id)) leaf = next;
  conversation.leaf = leaf.id;
}

/** Messages as the server takes them. */
export function messages(conversation, until = Infinity) {
  const system = conversation.settings.system?.trim();
  const said = path(conversation).slice(0, until).map(({ role, text }) => ({ role, content: text }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}

/** The conversation as it is shown, in a form that is read elsewhere: `messages` as instruction rows have them. */
export function asJson(conversation) {
  const { system, ...settings } = conversation.settings;
  return JSON.stringify({ title: conversation.title, settings, messages: messages(conversation) }, null, 2) + "\n";
}

export function asMarkdown(conversation, words) {
  const parts = messages(conversation).map(({ role, content }) => `## ${words[role]}\n\n${content}\n`);
  return [`# ${conversation.title}\n`, ...parts].join("\n");
}

/** Milliseconds, never the same twice, so that the order of conversations is sure. */
function now() {
  lastTime = Math.max(Date.now(), lastTime + 1);
  return lastTime;
}
