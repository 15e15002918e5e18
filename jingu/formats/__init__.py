"""Read and write models in other formats: Hugging Face folders, safetensors, GGUF (reading only), peft."""
