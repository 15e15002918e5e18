"""Call a server with LangChain; print the results as JSON. Arguments: the server's URL, and the tool's definition."""

from __future__ import annotations

import json
import sys
from typing import Any

import langchain_openai  # type: ignore[import-not-found,unused-ignore]
import pydantic


class Group(pydantic.BaseModel):
    """A structured output."""

    place: str
    people: int


if __name__ == "__main__":
    fields: dict[str, Any] = {"model": "tiny", "base_url": f"{sys.argv[1]}/v1", "api_key": "a"}
    chat = langchain_openai.ChatOpenAI(**fields)
    (call,) = chat.bind_tools([json.loads(sys.argv[2])]).invoke("Write it.").tool_calls
    embeddings = langchain_openai.OpenAIEmbeddings(**fields, check_embedding_ctx_length=False)
    results = {
        "answer": chat.invoke("Hi").content,
        "arguments": call["args"],
        "group": chat.with_structured_output(Group).invoke("as JSON").model_dump(),
        "embeddings": embeddings.embed_documents(["a"] * 1000),
    }
    print(json.dumps(results))
