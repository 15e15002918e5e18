"""The HTTP server: several protocols (OpenAI, text-generation-inference, Anthropic, Ollama, vLLM) over one engine."""
