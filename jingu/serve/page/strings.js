// The page's texts, in the browser's language.

const en = {
  skip: "Skip to the message", conversations: "Conversations", new: "New conversation", keyNew: "Alt+N",
  closeSide: "Close the list", model: "Model", export: "Export", settings: "Settings", keySettings: "Alt+,",
  messages: "Messages", empty: "Ask something. Conversations are stored only in this browser.", message: "Message",
  starters: "Suggestions",
  starterTexts: [
    "Explain in three sentences how a language model writes text.", "Write a short poem about the first snow.",
    "Write a Python function that finds the longest word in a text.", "Give me five names for a small bakery.",
  ],
  placeholder: "Write a message", send: "Send", stop: "Stop", close: "Close",
  hint: "Enter to send, Shift+Enter for a new line, Esc to stop the answer.",
  system: "System prompt", temperature: "Temperature", max_tokens: "Max tokens", top_p: "Top-p", seed: "Seed",
  presence_penalty: "Presence penalty", frequency_penalty: "Frequency penalty",
  blank: "Empty fields use the server's defaults. Settings belong to the conversation; a new one starts with those of the last.",
  theme: "Theme", themeSystem: "System", themeLight: "Light", themeDark: "Dark",
  key: "API key (until this tab closes)", keys: "Keyboard shortcuts",
  user: "You", assistant: "Model", code: "code", copy: "Copy", copied: "Copied", copyCode: "Copy this code",
  copyMessage: "Copy this message", edit: "Edit", again: "Regenerate", againTitle: "Regenerate the answer (Alt+R)", save: "Save",
  saveSend: "Save and send", cancel: "Cancel", previous: "Previous version", next: "Next version", version: "Version",
  reasoning: "Reasoning", reasons: "Reasoning…",
  rename: "Rename", remove: "Delete", sureRemove: "Delete this conversation?", newName: "New name", untitled: "New conversation",
  answering: "The model is answering.", answered: "The answer is complete.", stopped: "Stopped.", cut: "Truncated at max tokens.",
  broken: "The connection was lost before the answer was complete.", unreachable: "The server cannot be reached.",
  full: "The browser's storage is full: this conversation is not saved. Export it, or delete others.",
  tokens: "tokens", rate: (count) => `${count} tokens/s`,
  list: [
    ["Enter", "send"], ["Shift+Enter", "new line"], ["Esc", "stop the answer, cancel an edit"],
    ["↑", "edit your last message (if the input is empty)"], ["Alt+N", "new conversation"], ["Alt+R", "regenerate the answer"],
    ["Alt+↑ Alt+↓", "previous, next conversation"], ["Alt+,", "settings"],
  ],
};

const zh = {
  skip: "跳到输入框", conversations: "对话", new: "新对话", keyNew: "Alt+N",
  closeSide: "收起列表", model: "模型", export: "导出", settings: "设置", keySettings: "Alt+,",
  messages: "消息", empty: "请提问。对话只保存在此浏览器中。", message: "消息",
  starters: "建议",
  starterTexts: ["用三句话说明语言模型如何写出文字。", "写一首关于初雪的短诗。", "写一个找出文本中最长单词的 Python 函数。", "为一家小面包店起五个名字。"],
  placeholder: "输入消息", send: "发送", stop: "停止", close: "关闭",
  hint: "Enter 发送，Shift+Enter 换行，Esc 停止回答。",
  system: "系统提示", temperature: "温度", max_tokens: "最大词元数", top_p: "Top-p", seed: "随机种子",
  presence_penalty: "存在惩罚", frequency_penalty: "频率惩罚",
  blank: "留空则由服务器决定。设置属于当前对话；新对话沿用上一个对话的设置。",
  theme: "颜色", themeSystem: "跟随系统", themeLight: "浅色", themeDark: "深色",
  key: "API 密钥（关闭标签页后清除）", keys: "快捷键",
  user: "我", assistant: "模型", code: "代码", copy: "复制", copied: "已复制", copyCode: "复制代码",
  copyMessage: "复制消息", edit: "编辑", again: "重答", againTitle: "重新回答 (Alt+R)", save: "保存",
  saveSend: "保存并发送", cancel: "取消", previous: "上一版本", next: "下一版本", version: "版本",
  reasoning: "思考过程", reasons: "正在思考…",
  rename: "重命名", remove: "删除", sureRemove: "删除此对话？", newName: "名称", untitled: "新对话",
  answering: "模型正在回答。", answered: "回答完毕。", stopped: "已停止。", cut: "已达最大词元数，回答被截断。",
  broken: "回答完成前连接中断。", unreachable: "无法连接服务器。",
  full: "浏览器存储已满：此对话未保存。请导出，或删除其他对话。",
  tokens: "词元", rate: (count) => `每秒 ${count}`,
  list: [
    ["Enter", "发送"], ["Shift+Enter", "换行"], ["Esc", "停止回答，退出编辑"],
    ["↑", "输入框为空时：编辑上一条消息"], ["Alt+N", "新对话"], ["Alt+R", "重新回答"],
    ["Alt+↑ Alt+↓", "上一个、下一个对话"], ["Alt+,", "设置"],
  ],
};

export const isChinese = navigator.language.toLowerCase().startsWith("zh");
export const strings = isChinese ? zh : en;
