"""One SGLang engine in its own process, answering JSON lines on a Unix socket; `sglang_common` starts it.

Several engines can then live side by side on one GPU, and an engine can outlive the program that started it,
since a start takes a minute. A message is one line of JSON with the name of a method below and its arguments:

    {"call": "run", "requests": [...], "concurrency": 8}  ->  {"wall_s": ..., "answers": [...]}

A request has `tokens` (the prompt), `sampling` (SGLang's sampling parameters) and, where wanted, `stream`
and `abort_after_s`. Needs SGLang.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
import uuid
from pathlib import Path
from typing import Any

# Of a line on the socket; a batch of prompts is one.
LINE_BYTES = 1 << 28
FLUSH_LIMIT_S = 10


class EngineServer:
    """Answers the calls of one connection after the other.

    Args:
        engine: sglang.Engine.
        start_s: how long its start took.
    """

    def __init__(self, engine: Any, start_s: float) -> None:
        self.engine = engine
        self.start_s = start_s
        self.ended = asyncio.Event()
        self._to_start = 0
        self._all_started = asyncio.Event()

    async def info(self) -> dict[str, Any]:
        """The version and the settings that decide speed, as SGLang resolved them."""
        import sglang

        manager = self.engine.tokenizer_manager
        states = await manager.get_internal_state()
        state = next((state for state in states if isinstance(state, dict)), {})
        names = (
            "attention_backend", "sampling_backend", "speculative_algorithm", "speculative_num_draft_tokens",
            "speculative_draft_attention_backend", "disable_overlap_schedule", "disable_cuda_graph",
            "page_size", "dtype", "max_running_requests", "grammar_backend",
        )  # fmt: skip
        settings = {name: state.get(name, getattr(manager.server_args, name, None)) for name in names}
        return {
            "sglang": sglang.__version__,
            "start_s": round(self.start_s, 1),
            "context_tokens": manager.model_config.context_len,
            "settings": settings,
        }

    async def run(
        self, requests: list[dict[str, Any]], concurrency: int, profile: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Answer requests in order, `concurrency` of them at a time; times are seconds since the start.

        `profile` has a folder for a trace of `num_steps` batches, begun once every request, all of which must
        run at once and be streamed, has its first token.
        """
        slots, begin = asyncio.Semaphore(concurrency), time.perf_counter()
        self._to_start, self._all_started = len(requests), asyncio.Event()
        if profile is not None:
            tracing = asyncio.create_task(self._profile(**profile))
        answers = await asyncio.gather(*(self._answer(request, slots, begin) for request in requests))
        if profile is not None:
            self._all_started.set()  # also where a request failed
            await tracing
        return {"wall_s": time.perf_counter() - begin, "answers": answers}

    async def _answer(
        self, request: dict[str, Any], slots: asyncio.Semaphore, begin: float
    ) -> dict[str, Any]:
        async with slots:
            manager, name = self.engine.tokenizer_manager, uuid.uuid4().hex
            answer: dict[str, Any] = {"begin_s": time.perf_counter() - begin}
            timer = None
            if "abort_after_s" in request:
                timer = asyncio.get_running_loop().call_later(
                    request["abort_after_s"], manager.abort_request, name
                )
            try:
                async for chunk in self._chunks(request, name):
                    if "first_s" not in answer:
                        answer["first_s"] = time.perf_counter() - begin
                        self._to_start -= 1
                        if self._to_start == 0:
                            self._all_started.set()
                    answer["tokens"] = chunk["output_ids"]
                    answer["finish"] = chunk["meta_info"].get("finish_reason")
                    answer["rounds"] = chunk["meta_info"].get("spec_verify_ct", 0)
            except (ValueError, RuntimeError, asyncio.CancelledError) as error:
                answer["error"] = f"{type(error).__name__}: {error}"
            finally:
                if timer is not None:
                    timer.cancel()
            answer["end_s"] = time.perf_counter() - begin
            return answer

    async def _chunks(self, request: dict[str, Any], name: str) -> Any:
        """The whole answer so far, once or, streamed, several times."""
        arguments = {"input_ids": request["tokens"], "sampling_params": request["sampling"], "rid": name}
        if not request.get("stream"):
            yield await self.engine.async_generate(**arguments)
            return
        async for chunk in await self.engine.async_generate(**arguments, stream=True):
            yield chunk

    async def flush(self) -> dict[str, Any]:
        """Empty the prefix cache; the scheduler is done with the last request a moment after its answer."""
        success, begin = False, time.monotonic()
        while not success and time.monotonic() - begin < FLUSH_LIMIT_S:
            success = (await self.engine.tokenizer_manager.flush_cache()).success
            if not success:
                await asyncio.sleep(0.02)
        return {"success": success}

    async def pool(self) -> dict[str, Any]:
        """Tokens that hold a KV slot, out of how many, and requests that are under way."""
        loads = await self.engine.tokenizer_manager.get_loads()
        return {
            "used_tokens": sum(load.num_used_tokens for load in loads),
            "capacity_tokens": sum(load.max_total_num_tokens for load in loads),
            "requests": sum(load.num_running_reqs + load.num_waiting_reqs for load in loads),
        }

    async def _profile(self, folder: str, num_steps: int) -> None:
        from sglang.srt.managers.io_struct import ProfileReq

        await self._all_started.wait()
        request = ProfileReq(
            output_dir=folder, num_steps=num_steps, activities=["CPU", "GPU"], with_stack=False,
            record_shapes=False,
        )  # fmt: skip
        await self.engine.tokenizer_manager.start_profile(request)

    async def shutdown(self) -> dict[str, Any]:
        """End the process after this answer."""
        self.ended.set()
        return {}

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the lines of one connection until it closes."""
        while line := await reader.readline():
            message = json.loads(line)
            try:
                reply = {"result": await getattr(self, message.pop("call"))(**message)}
            except Exception as error:  # the caller is told; the engine lives on
                reply = {"error": f"{type(error).__name__}: {error}"}
            writer.write(json.dumps(reply, default=str).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def serve(self, socket: Path, linger_s: float) -> None:
        """Listen until told to end, or until nobody has been connected for `linger_s`."""
        connections, last_s = 0, time.monotonic()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connections, last_s
            connections += 1
            try:
                await self.converse(reader, writer)
            except ConnectionError:
                pass
            finally:
                connections, last_s = connections - 1, time.monotonic()
                if linger_s == 0:
                    self.ended.set()

        listener = await asyncio.start_unix_server(connected, path=socket, limit=LINE_BYTES)
        # The first connection may come late: the other engines start one after the other.
        while not self.ended.is_set() and (connections or time.monotonic() - last_s < max(linger_s, 600)):
            await asyncio.sleep(0.2)
        listener.close()
        socket.unlink(missing_ok=True)


def end_with(parent: int) -> None:
    """End this process and its engine once the program that started it is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    options = json.loads(sys.argv[1])
    if options["linger_s"] == 0:
        threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    import sglang

    started = time.perf_counter()
    engine = sglang.Engine(**options["engine"])

    async def serve() -> None:
        server = EngineServer(engine, time.perf_counter() - started)
        await server.serve(Path(options["socket"]), options["linger_s"])

    engine.loop.run_until_complete(serve())
    engine.shutdown()
    os._exit(0)  # whatever threads SGLang left


if __name__ == "__main__":
    main()
