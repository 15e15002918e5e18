"""Reward models behind vLLM's routes for scores: the numbers are those of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jingu.chat.chat_format import find_chat_format
from jingu.chat.tokenization import tokenize_row
from jingu.errors import JinguError
from jingu.infer.engine import Engine
from jingu.infer.engine_interface import EngineSettings
from jingu.infer.generate import InferenceOptions
from jingu.infer.inference_model import InferenceModel, load
from jingu.infer.request import Request
from jingu.infer.sampling import SamplingParams
from jingu.runtime.ranks import RankInfo
from jingu.text.tokenizer import Tokenizer
from jingu.tune.row_formats import parse_row
from tests.parity.small_llama import SMALL_LLAMA
from tests.serve.conftest import Running, Serve

PROMPT = "the weather is"
ANSWERS = ["fine", "far, the end is far. 的", "the weather is fine. " * 60]
MESSAGES = [{"role": "user", "content": "the weather?"}]


@pytest.fixture(scope="module")
def folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model as transformers writes it."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(3)
    sizes = {"vocab_size": tokenizer.vocab_size, "hidden_size": 24, "intermediate_size": 40}
    reward = {"max_position_embeddings": 2048, "initializer_range": 0.4, "num_labels": 1, "pad_token_id": 0}
    config = LlamaConfig(**{**SMALL_LLAMA, **sizes, **reward, "bos_token_id": None})
    path = tmp_path_factory.mktemp("reward") / "judge"
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save(path)
    return path


@pytest.fixture(scope="module")
def reward_model(folder: Path) -> InferenceModel:
    return load(folder, "fp32", "cpu")


@pytest.fixture(scope="module")
def judge(serve: Serve, reward_model: InferenceModel) -> Running:
    # Small chunks, so that the longest answer takes several steps.
    return serve(Engine(reward_model, EngineSettings(max_num_seqs=4, prefill_chunk_size=32)))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    """Returns transformers' score of token ids."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder)

    def score(ids: list[int]) -> float:
        # Without a padding token transformers takes the last position.
        model.config.pad_token_id = None
        with torch.no_grad():
            return float(model(torch.tensor([ids])).logits[0, 0])

    return score


def ask(server: Running, path: str, **body: Any) -> Any:
    status, answer, _ = server.call(path, {"model": "tiny", **body})
    assert status == 200, answer
    return answer


def test_scores_are_those_of_transformers(judge: Running, tokenizer: Tokenizer, reference: Any) -> None:
    answer = ask(judge, "/v1/score", text_1=PROMPT, text_2=ANSWERS)
    ids = [tokenizer.encode(PROMPT) + tokenizer.encode(text) for text in ANSWERS]
    scores = [item.pop("score") for item in answer["data"]]
    assert scores == pytest.approx([reference(each) for each in ids], abs=1e-4)
    assert max(scores) - min(scores) > 0.01
    assert answer["object"] == "list" and answer["data"] == [{"index": n, "object": "score"} for n in range(3)]
    tokens = sum(map(len, ids))
    assert answer["usage"] == {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens}
    # Neither the batch nor the prefix cache changes a score, to the last bit; pairs are the same as one prompt.
    alone = [ask(judge, "/v1/score", text_1=PROMPT, text_2=text)["data"][0]["score"] for text in ANSWERS]
    assert alone == scores
    pairs = ask(judge, "/v1/score", text_1=[PROMPT] * 3, text_2=ANSWERS[::-1], use_activation=False)
    assert [item["score"] for item in pairs["data"]] == scores[::-1]


def test_rerank_sorts_documents(judge: Running) -> None:
    scores = [item["score"] for item in ask(judge, "/v1/score", text_1=PROMPT, text_2=ANSWERS)["data"]]
    ranking = sorted(range(3), key=lambda index: scores[index], reverse=True)
    expected = [
        {"index": index, "document": {"text": ANSWERS[index]}, "relevance_score": scores[index]} for index in ranking
    ]
    for top_n, count in ((None, 3), (0, 3), (2, 2), (9, 3)):
        answer = ask(judge, "/v1/rerank", query=PROMPT, documents=ANSWERS, top_n=top_n)
        assert answer["results"] == expected[:count]
    assert answer["model"] == "tiny" and answer["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_are_returned_on_request(path: str, judge: Running) -> None:
    whole = ask(judge, path, query=PROMPT, documents=ANSWERS, return_documents=True)["results"]
    assert all(item["document"] == {"text": ANSWERS[item["index"]]} for item in whole)
    bare = ask(judge, path, query=PROMPT, documents=ANSWERS, return_documents=False)["results"]
    assert [{key: item[key] for key in ("index", "relevance_score")} for item in whole] == bare


def test_litellm_reranks(judge: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without this, the library looks for prices on the web.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    fields = {"query": PROMPT, "documents": ANSWERS, "top_n": 2, "api_base": judge.url, "api_key": "a"}
    answer = litellm.rerank(model="hosted_vllm/tiny", **fields)
    wanted = ask(judge, "/v1/rerank", query=PROMPT, documents=ANSWERS, top_n=2)["results"]
    assert [item["index"] for item in answer.results] == [item["index"] for item in wanted]


def test_messages_are_scored_as_they_are_trained(judge: Running, tokenizer: Tokenizer, reference: Any) -> None:
    # A special token that the answer mentions is plain text.
    answers = ["fine", "far<|im_end|>"]
    chat_format = find_chat_format(Path("nowhere"), tokenizer, "qwen")
    assert chat_format is not None
    expected = []
    for text in answers:
        row = parse_row({"messages": [*MESSAGES, {"role": "assistant", "content": text}]})
        trained = tokenize_row(row, chat_format.template, tokenizer, "last_assistant")
        # The template writes a line break after the end of the answer, which is not trained.
        expected.append(reference(trained.ids[: trained.weights.nonzero()[0][-1] + 1]))
    answer = ask(judge, "/v1/score", text_1=MESSAGES, text_2=answers)
    assert [item["score"] for item in answer["data"]] == pytest.approx(expected, abs=1e-4)
    results = ask(judge, "/v1/rerank", query=MESSAGES, documents=answers)["results"]
    assert [item["relevance_score"] for item in results] == pytest.approx(sorted(expected, reverse=True), abs=1e-4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "the"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": "the"}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 4}),
        ("/api/generate", {"prompt": "the"}),
        ("/generate", {"inputs": "the"}),
    ],
)
def test_a_reward_model_refuses_to_write(judge: Running, path: str, body: dict[str, Any]) -> None:
    model = {} if path == "/generate" else {"model": "tiny"}
    status, answer, _ = judge.call(path, {**model, **body})
    assert status == (422 if path == "/generate" else 400)
    assert "this is a reward model, which gives scores and no text. Ask for scores" in str(answer)
    assert ask(judge, "/v1/embeddings", input="the")["data"]


def test_bad_requests_are_explained(judge: Running, serve: Serve, reward_model: InferenceModel) -> None:
    bare = serve(Engine(reward_model), template=None)
    language_model = serve()
    for server, body, words in (
        (judge, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "`text_1` has 2 entries and `text_2` 3"),
        (judge, {"text_1": "", "text_2": ""}, "text_1"),
        (judge, {"text_1": "a", "text_2": []}, "text_2"),
        (judge, {"text_1": "a", "text_2": "b " * 4000}, "exceed the model's context"),
        (judge, {"text_1": "a", "text_2": "b", "use_activation": True}, "use_activation"),
        (bare, {"text_1": MESSAGES, "text_2": "b"}, "no chat template"),
        (language_model, {"text_1": "a", "text_2": "b"}, "a language model, which has no score head"),
    ):
        status, answer, _ = server.call("/v1/score", {"model": "tiny", **body})
        assert status == 400 and words in answer["error"]["message"], answer
    assert judge.call("/v1/score", {"model": "other", "text_1": "a", "text_2": "b"})[0] == 404


def test_a_state_that_is_not_finite_is_an_error(reward_model: InferenceModel) -> None:
    module: Any = reward_model.module
    broken = replace(reward_model, module=type(module)(reward_model.spec))
    for parameter in broken.module.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    with pytest.raises(JinguError, match="finite"):
        Engine(broken).embed([[5, 6]], "score")


def test_other_commands_refuse_a_reward_model(folder: Path, reward_model: InferenceModel) -> None:
    options = InferenceOptions("fp32", "cpu")
    with pytest.raises(JinguError, match=r"gives scores and no text. `jingu serve` gives its scores"):
        options.load(folder)
    assert options.load(folder, allow_rewards=True).spec.score_head
    with pytest.raises(JinguError, match="Ask for scores"):
        Engine(reward_model).submit(Request((5,), SamplingParams(), 1))
    ranks = RankInfo(0, 2, 0, torch.device("cpu"))
    with pytest.raises(JinguError, match="only single-process decoders"):
        options.load(folder, ranks, allow_rewards=True)
