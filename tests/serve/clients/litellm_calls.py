"""Call a server with LiteLLM; print the results as JSON. Arguments: the server's URL, and the tool's definition."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm  # type: ignore[import-not-found,unused-ignore]


def call(provider: str, base: str, tool: dict[str, Any]) -> dict[str, Any]:
    """Return an answer, a streamed answer, the arguments of a tool call, and embeddings."""
    body: dict[str, Any] = {"model": f"{provider}/tiny", "api_base": base, "api_key": "a", "max_tokens": 300}
    messages = [{"role": "user", "content": "Hi"}]
    chunks = litellm.completion(**body, messages=messages, stream=True)
    results = {
        "answer": litellm.completion(**body, messages=messages).choices[0].message.content,
        "stream": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
    }
    if provider == "ollama":
        embeddings = litellm.embedding("ollama/tiny", input=["a", "b"], api_base=base)
        return {**results, "embeddings": [row["embedding"] for row in embeddings.data]}
    answer = litellm.completion(**body, messages=[{"role": "user", "content": "Write it."}], tools=[tool])
    (tool_call,) = answer.choices[0].message.tool_calls
    return {**results, "arguments": json.loads(tool_call.function.arguments)}


if __name__ == "__main__":
    url, tool = sys.argv[1], json.loads(sys.argv[2])
    providers = {"openai": "/v1", "hosted_vllm": "/v1", "ollama": "", "ollama_chat": "", "anthropic": ""}
    print(json.dumps({provider: call(provider, url + path, tool) for provider, path in providers.items()}))
