"""Conversations: messages, chat templates, the loss weights of their tokens, and tool calls."""
