"""Sixty-four clients of another process at once: right texts, nothing lost, nothing left behind."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from ddtree.config import SamplingParams
from server_kit import VOCAB_SIZE, alone, sample, wait_for

NUM_CLIENTS = 64
SAMPLING = {"max_tokens": 8, "temperature": 0.8, "frequency_penalty": 0.3}
MODES = ("ar", "chain", "tree")


def request_of(number):
    """What a client asks for: prompts, seeds, modes, streams and log-probabilities of all kinds."""
    return {
        "messages": [{"role": "user", "content": f"Question {number} 你好"}],
        **SAMPLING,
        "seed": number,
        "stop": ["zz"],
        "logit_bias": {str(number % VOCAB_SIZE): -5},
        "stream": number % 2 == 0,
        "logprobs": number % 5 == 0,
        "ddtree": {"mode": MODES[number % 3]},
    }


def text_of_alone(engine, number):
    sampling = SamplingParams(**SAMPLING, seed=number, stop=("zz",), logit_bias={number % VOCAB_SIZE: -5})
    return alone(engine, f"Question {number} 你好", sampling, mode=MODES[number % 3]).text


def start_clients(url, requests, leave_after=None):
    """The program of `load_clients.py`, its requests on the way."""
    command = [sys.executable, str(Path(__file__).with_name("load_clients.py")), url, str(leave_after or 0)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdin.write(json.dumps(requests).encode())
    process.stdin.close()
    return process


def results_of(process):
    output = process.stdout.read()
    process.stdout.close()
    assert process.wait(60) == 0
    return json.loads(output)


def test_sixty_four_clients_get_the_text_they_would_get_alone(live):
    expected = [text_of_alone(live.engine, number) for number in range(NUM_CLIENTS)]
    assert len(set(expected)) > NUM_CLIENTS // 2
    results = results_of(start_clients(live.url, [request_of(number) for number in range(NUM_CLIENTS)]))
    assert [result["status"] for result in results] == [200] * NUM_CLIENTS
    assert [result["text"] for result in results] == expected
    service = live.service
    assert sample(service, "requests_total", endpoint="chat_completions", outcome="ok") == NUM_CLIENTS
    assert sample(service, "queue_requests") == sample(service, "running_requests") == 0
    assert sample(service, "queue_wait_seconds_count") == NUM_CLIENTS


def test_clients_that_vanish_leave_nothing_behind(live):
    """Half of the clients cut the connection in the middle of their stream or while they wait."""
    service = live.service
    requests = [
        request_of(number) | {"stream": True, "max_tokens": 300, "ignore_eos": True, "stop": None}
        for number in range(32)
    ]
    results = results_of(start_clients(live.url, requests, leave_after=3))
    assert {result["status"] for result in results} == {"left"}
    wait_for(lambda: service.queue.is_idle, "the queue to be empty")

    def cancelled():
        return sample(service, "requests_total", endpoint="chat_completions", outcome="cancelled")

    wait_for(lambda: cancelled() == len(requests), "all to be counted")
    assert sample(service, "queue_requests") == sample(service, "running_requests") == 0
    assert sample(service, "tokens_total", kind="completion") < 300 * len(requests)
    [after] = results_of(start_clients(live.url, [request_of(5)]))
    assert after["text"] == text_of_alone(live.engine, 5)
    assert live.engine.lock.acquire(blocking=False), "the engine is free"
    live.engine.lock.release()
    assert open_tasks(live) == 0


def open_tasks(live):
    """Tasks on the server's loop that belong to requests, once the last connection is closed."""
    loop = live.server.servers[0].get_loop()
    wait_for(lambda: count(loop) == 0, "tasks to end")
    return count(loop)


def count(loop):
    async def tasks():
        names = [str(task.get_coro()) for task in asyncio.all_tasks()]
        return sum("run_asgi" in name or "_until_gone" in name for name in names)

    return asyncio.run_coroutine_threadsafe(tasks(), loop).result(10)
