"""A program of its own: sends chat requests all at once, and leaves some of the streams early.

Arguments: the server's address, and after how many chunks to leave (0: never). Requests come as a JSON list
on standard input; results go to standard output in the same order.
"""

import asyncio
import json
import sys

import httpx


async def ask(client, request, leave_after):
    """One request to its end, or until the client has enough of it or of waiting."""
    if not request["stream"]:
        answer = await client.post("/v1/chat/completions", json=request)
        choice = answer.json()["choices"][0]
        return {"status": answer.status_code, "text": choice["message"]["content"]}
    text, chunk_ct = "", 0
    async with client.stream("POST", "/v1/chat/completions", json=request) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                document = json.loads(line.removeprefix("data: "))
                text += "".join(choice["delta"].get("content", "") for choice in document["choices"])
                chunk_ct += 1
            if leave_after and chunk_ct >= leave_after:
                return {"status": "left"}
    assert line == "" or line == "data: [DONE]"
    return {"status": answer.status_code, "text": text}


async def ask_or_leave(client, request, leave_after):
    if not leave_after:
        return await ask(client, request, 0)
    # Those at the end of the queue lose patience before they get anything.
    try:
        return await asyncio.wait_for(ask(client, request, leave_after), 0.5 + request["seed"] / 16)
    except TimeoutError:
        return {"status": "left"}


async def main(url, leave_after):
    requests = json.load(sys.stdin)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        results = await asyncio.gather(*(ask_or_leave(client, request, leave_after) for request in requests))
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
