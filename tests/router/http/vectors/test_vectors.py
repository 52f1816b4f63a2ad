"""Embeddings, rerank and score over HTTP: what OpenAI's package and other clients send and read."""

import base64
from array import array

import pytest
from lazily import lazily

from gpu_worker.pooling.vectors import vector_of
from gpu_worker.scheduling.state.pooling import PoolingEnd
from gpu_worker.testing.fake_runner import fold, state_vector
from octavo.pooling.params import PoolingParams
from octavo.pooling.vectors import cosine

openai = lazily("openai")


def expected(text, **params):
    states = array("f", state_vector(fold(list(text.encode()))))
    return vector_of(PoolingEnd(states), PoolingParams(**params), len(text)).tolist()


@pytest.fixture
async def client(world):
    await world.start()
    made = openai.AsyncOpenAI(base_url=f"http://{world.routers[0].http_endpoint}/v1", api_key="none", max_retries=0)
    yield made
    await made.close()


async def test_openais_package_reads_vectors(client):
    one = await client.embeddings.create(model="fake", input="Hello")  # it asks for base64
    assert one.data[0].embedding == expected("Hello")
    assert (one.model, one.usage.prompt_tokens, one.usage.total_tokens) == ("fake", 5, 5)
    texts = [f"text {i}" for i in range(100)]
    many = await client.embeddings.create(model="fake", input=texts, dimensions=4, encoding_format="float")
    assert [each.embedding for each in many.data] == [expected(text, dimensions=4) for text in texts]
    assert [each.index for each in many.data] == list(range(100))
    for ids in (list(b"Hi"), [list(b"Hi"), list(b"Ho")]):
        found = await client.embeddings.create(model="fake", input=ids)
        assert found.data[0].embedding == expected("Hi")


async def post(world, path, body, **headers):
    status, _, found = await world.http(world.routers[0].http_endpoint, path, body, method="POST", **headers)
    return status, found


async def test_rerank_and_score_have_the_shapes_of_others(world):
    await world.start()
    query, documents = "what?", ["one", "two", "three"]
    scores = [cosine(expected(query), expected(each)) for each in documents]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        body = {"model": "fake", "query": query, "documents": documents, "top_n": 2}
        status, found = await post(world, path, body)
        best = sorted(range(3), key=lambda i: -scores[i])[:2]
        wanted = [{"index": i, "relevance_score": scores[i], "document": {"text": documents[i]}} for i in best]
        assert (status, found["results"]) == (200, wanted)
    body = {"query": query, "documents": [{"text": each} for each in documents], "return_documents": False}
    assert all("document" not in each for each in (await post(world, "/rerank", body))[1]["results"])
    for path, names in (("/score", "text_1 text_2"), ("/v1/score", "queries documents"), ("/score", "queries items")):
        status, found = await post(world, path, dict(zip(names.split(), (query, documents), strict=True)))
        assert (status, [each["score"] for each in found["data"]]) == (200, scores)
    status, raw = await post(world, "/v1/embeddings", {"input": "Hi", "encoding_format": "base64", "normalize": False})
    assert array("f", base64.b64decode(raw["data"][0]["embedding"])).tolist() == state_vector(fold(list(b"Hi")))


WRONG = [
    ("/v1/embeddings", {}, "input"),
    ("/v1/embeddings", {"input": []}, "input"),
    ("/v1/embeddings", {"input": ["a", 5]}, "input[1]"),
    ("/v1/embeddings", {"input": [[1], [1000]]}, "input[1]"),
    ("/v1/embeddings", {"input": [[[1]]]}, "input[0]"),
    ("/v1/embeddings", {"input": ["x"] * 2049}, "input"),
    ("/v1/embeddings", {"input": "x", "dimensions": 17}, "dimensions"),
    ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions"),
    ("/v1/embeddings", {"input": "x", "encoding_format": "int8"}, "encoding_format"),
    ("/v1/embeddings", {"input": "x", "pooling": "first"}, "pooling"),
    ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "\ud800"}, "input"),
    ("/rerank", {"documents": ["a"]}, "query"),
    ("/rerank", {"query": "q", "documents": []}, "documents"),
    ("/rerank", {"query": "q", "documents": [{"image": "x"}]}, "documents[0]"),
    ("/rerank", {"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
    ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
    ("/score", {"text_1": "a", "text_2": ["b", ""]}, "text_2[1]"),
    ("/score", {"text_1": "a", "text_2": "b", "method": "qwen3"}, "method"),
]


async def test_what_is_wrong_is_named(world):
    await world.start()
    for path, body, param in WRONG:
        status, found = await post(world, path, body)
        assert (status, found["error"]["param"]) == (400, param), found
