"""Model files of others, in and out: Hugging Face folders, safetensors, GGUF, peft."""
