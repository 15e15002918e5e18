"""Conversations as a model reads and writes them: messages, chat templates, loss weights and tool calls."""
