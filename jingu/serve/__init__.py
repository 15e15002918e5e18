"""A model behind HTTP: the protocols of text-generation-inference and OpenAI over one engine."""
